# SPDX-License-Identifier: BSD-3-Clause
"""Give sub-commands the scheduler of an app."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.schedulers import registered
from torchx_monarch.schedulers.monarch import MonarchScheduler


def app_id_of(handle: str) -> tuple[str, str]:
    """Return the scheduler's name and the app's id of a TorchX handle.

    Raises:
        torchx.specs.MalformedAppHandleException: it is no handle.
    """
    from torchx.specs import parse_app_handle

    scheduler, _, app_id = parse_app_handle(handle)
    return str(scheduler), str(app_id)


@contextlib.contextmanager
def opened(name: str) -> Iterator[MonarchScheduler]:
    """Create a scheduler of this package; close its connections afterwards.

    Raises:
        UserError: the name is not that of a scheduler of this package.
        BackendError: the client library that its backend needs is not installed.
    """
    from torchx.schedulers import get_scheduler_factories

    factories = get_scheduler_factories()
    ours = ", ".join(registered())
    if name not in factories:
        raise UserError(f"there is no scheduler {name!r}; those of torchx-monarch are {ours}")
    scheduler = factories[name]("torchx")
    if not isinstance(scheduler, MonarchScheduler):
        raise UserError(f"{name} is a scheduler of another package; those of torchx-monarch are {ours}")
    try:
        yield scheduler
    finally:
        scheduler.inner.close()
