# SPDX-License-Identifier: BSD-3-Clause
"""Register this package's schedulers when TorchX is configured to ignore entry points.

By default TorchX reads entry points and namespace packages (``TORCHX_PLUGINS_SOURCE=3``), and each command warns of a
name that both register. So this module registers names only under ``TORCHX_PLUGINS_SOURCE=1``.
"""

from __future__ import annotations

import importlib
import os

from torchx.plugins import register
from torchx.schedulers import DEFAULT_SCHEDULER_MODULES
from torchx.schedulers.api import Scheduler

from torchx_monarch.schedulers import NAMES, create

if os.environ.get("TORCHX_PLUGINS_SOURCE") == "1":
    _name, _module = next(iter(DEFAULT_SCHEDULER_MODULES.items()))

    # TorchX's default scheduler is the first registered name, and TorchX registers the functions of this module in the
    # order of dir(). The name `_0_default` sorts first and keeps TorchX's own default.
    @register.scheduler(name=_name)  # type: ignore[untyped-decorator]
    def _0_default(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        scheduler: Scheduler[dict[str, object]] = importlib.import_module(_module).create_scheduler(
            session_name, **kwargs
        )
        return scheduler

    for _scheduler in NAMES:
        # A function of this module, as TorchX asks for.
        def _create(session_name: str, _scheduler: str = _scheduler, **kwargs: object) -> Scheduler[dict[str, object]]:
            return create(_scheduler, session_name, **kwargs)

        globals()[_scheduler] = register.scheduler(name=_scheduler)(_create)
    del _create
