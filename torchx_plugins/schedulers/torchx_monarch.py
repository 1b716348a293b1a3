# SPDX-License-Identifier: BSD-3-Clause
"""Register this package's schedulers with TorchX's registries that read namespace packages.

A registry that reads entry points, too, as TorchX's own does by default, has them from there and warns of a name that
it finds twice. It gets only the schedulers of ``.torchxconfig`` (``[monarch_wrap]``), which no entry point can name.
"""

from __future__ import annotations

import functools
import importlib

from torchx.plugins import register
from torchx.schedulers import DEFAULT_SCHEDULER_MODULES
from torchx.schedulers.api import Scheduler

from torchx_monarch.backends.core import torchx_api
from torchx_monarch.schedulers import NAMES, configured_wraps, create, create_wrapped

_name, _module = next(iter(DEFAULT_SCHEDULER_MODULES.items()))


# TorchX's default scheduler is the first registered name, and TorchX registers the functions of this module in the
# order of their names in it. The name `_0_default` sorts first and keeps TorchX's own default.
@register.scheduler(name=_name)  # type: ignore[untyped-decorator]
def _0_default(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    scheduler: Scheduler[dict[str, object]] = importlib.import_module(_module).create_scheduler(session_name, **kwargs)
    return scheduler


def _register(attribute: str, name: str, factory: functools.partial[Scheduler[dict[str, object]]]) -> str:
    """Define a function of this module, as TorchX asks for; return its name in the module."""

    def create_scheduler(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        return factory(session_name, **kwargs)

    globals()[attribute] = register.scheduler(name=name)(create_scheduler)
    return attribute


_WRAPS = [
    _register(f"wrap_{name}", name, functools.partial(create_wrapped, name, wrapped))
    for name, wrapped in configured_wraps().items()
]
_ALL = ["_0_default", *_WRAPS, *(_register(name, name, functools.partial(create, name)) for name in NAMES)]


def __dir__() -> list[str]:
    """Return the names of the functions that the registry that asks is to collect."""
    return _WRAPS if torchx_api.asking_registry_reads_entry_points() else _ALL
