# SPDX-License-Identifier: BSD-3-Clause
"""Schedulers of TorchX's, wrapped (``torchx_monarch.schedulers.wrap``), as the contract uses them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler
from torchx.schedulers.local_scheduler import CWDImageProvider, LocalScheduler
from torchx.specs import AppDef, AppDryRunInfo, AppState, Resource

from tests.contract.place import Place
from torchx_monarch.backends.wrapped.backend import WrappedBackend
from torchx_monarch.client.connection import Target
from torchx_monarch.schedulers import wrap

CANNOT = {
    "groups restart alone": "TorchX's schedulers end an app with the first role that fails",
    **dict.fromkeys(
        ("lost host replaced", "spare host", "elastic role"),
        "TorchX does not tell which replica has failed, and its schedulers fail an app with any of them",
    ),
    "preemption": "TorchX has no word for it",
    "cancel while running": "TorchX does not tell which role has ended",
    "reading changes nothing": "TorchX does not tell which role has ended",
    "status and log long after, elsewhere": "TorchX tells no exit codes",
    "delete leaves nothing": "its delete is a cancel",
    "test_a_log_is_read_by_times_streams_and_expressions": "its logs have no times",
    "missing tool says what to install": "it needs nothing beside this package",
    "ends by itself": "that scheduler decides",
    "retry policies of commands": "that scheduler restarts what it can",
}
"""What no wrapped scheduler of these tests can do."""


class LocalCwd(LocalScheduler):  # type: ignore[misc]
    """TorchX's ``local_cwd``: all runners of a test share it, for it knows its own processes alone."""

    def __init__(self) -> None:
        super().__init__("torchx", CWDImageProvider)

    def close(self) -> None:
        """Do nothing: the test ends the apps."""


class LocalCwdPlace(Place):
    """TorchX's ``local_cwd``."""

    name = "wrapped_local_cwd"
    is_registered = False
    names_hosts = False
    cannot = {
        **CANNOT,
        "cancel while pending": "processes start immediately",
        "retries": "TorchX's local_cwd restarts nothing",
    }

    def __init__(self, folder: Path) -> None:
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._handlers = {number: signal.getsignal(number) for number in numbers}  # LocalScheduler sets others
        self.inner = LocalCwd()
        super().__init__(folder)

    def factory(self, session_name: str, **more: Any) -> Scheduler[Any]:
        """Create the scheduler."""
        return wrap(self.name, session_name, self.inner)

    @contextlib.contextmanager
    def reached(self, handle: str) -> Iterator[str]:
        """Yield the address of replica 0: the torchx command does not know the scheduler, which tells it."""
        there = Target.from_handle(handle, runner=self.runner).address
        yield f"{there.host}:{there.port}"

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the credentials of the processes, and what is stored of the app."""
        app_id = handle.rpartition("/")[2]
        request, backend = self.inner.describe_native(app_id).request, self.backend
        assert isinstance(backend, WrappedBackend)
        shown = Path(backend.records.path(app_id)).read_text()
        return request.role_params["trainer"][0].env["MONARCH_CREDENTIALS"], shown

    def close(self) -> None:
        """Delete the apps and their logs."""
        super().close()
        LocalScheduler.close(self.inner)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


class Minimal(Scheduler[dict[str, Any]]):  # type: ignore[misc]
    """A scheduler with nothing but what TorchX demands: it keeps apps in memory, and runs none of them."""

    def __init__(self, session_name: str) -> None:
        super().__init__("minimal", session_name)
        self.apps: dict[str, tuple[AppDef, AppState]] = {}

    def _submit_dryrun(self, app: AppDef, cfg: dict[str, Any]) -> AppDryRunInfo[AppDef, dict[str, Any]]:
        return AppDryRunInfo(app, repr)

    def schedule(self, dryrun_info: AppDryRunInfo[AppDef, dict[str, Any]]) -> str:
        """Store an app."""
        app_id = f"{dryrun_info.request.name}-{len(self.apps)}"
        self.apps[app_id] = dryrun_info.request, AppState.PENDING
        return app_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the state of an app and nothing else."""
        found = self.apps.get(app_id)
        return DescribeAppResponse(app_id, found[1]) if found else None

    def list(self, cfg: Any = None) -> list[ListAppResponse]:
        """Return all apps."""
        return [ListAppResponse(app_id, state) for app_id, (_, state) in self.apps.items()]

    def _cancel_existing(self, app_id: str) -> None:
        self.apps[app_id] = self.apps[app_id][0], AppState.CANCELLED


class MinimalPlace(Place):
    """A scheduler that has the abstract methods of TorchX's alone."""

    name = "wrapped_minimal"
    is_registered = False
    resource = Resource(cpu=1, gpu=0, memMB=1)  # TorchX demands one where a scheduler does not say otherwise
    cannot = {
        **CANNOT,
        **dict.fromkeys(
            (
                *(
                    "two hosts, digits",
                    "actors beside ranks",
                    "stacks of running ranks",
                    "function on hosts that stay",
                    "root cause in status",
                    "command at the end",
                    "retries",
                ),
                *("environment arrives whole", "credentials not on show", "log follow, since, until"),
            ),
            "it runs nothing, and reads no logs",
        ),
    }

    def __init__(self, folder: Path) -> None:
        self.inner = Minimal("torchx")
        super().__init__(folder)

    def factory(self, session_name: str, **more: Any) -> Scheduler[Any]:
        """Create the scheduler."""
        return wrap(self.name, session_name, self.inner)

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Submit an app: none begins."""
        yield self.run(self.role("true", replicas=2))
