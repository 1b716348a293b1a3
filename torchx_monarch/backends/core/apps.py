# SPDX-License-Identifier: BSD-3-Clause
"""Read, follow, wait for, cancel and delete the apps of a backend: the same on all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Generic, TypeVar

from torchx.schedulers.api import Stream

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.backend import Backend, Cfg, LogQuery
from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, TimedLines
from torchx_monarch.backends.core.state import HOST_EXTRA, AppStatus, reduce
from torchx_monarch.model.state import State

_END_EXTRA = 30.0
"""Seconds that an app may take to end beyond the grace period and that of its hosts: freeing memory takes time."""

S = TypeVar("S", bound=AppSnapshot)


class Apps(Generic[S]):
    def __init__(self, backend: Backend[Any, Any, S], scheduler: str) -> None:
        self.backend = backend
        self._scheduler = scheduler
        self._locks: dict[str, threading.Lock] = {}
        self._latest: dict[str, tuple[float, tuple[S, AppStatus] | None]] = {}

    def read(self, app_id: str, *, brief: bool = False) -> tuple[S, AppStatus] | None:
        """Read the state of an app; None if it does not exist; ``brief`` as for ``Backend.snapshot``."""
        try:
            app = self.backend.snapshot(app_id, brief=brief)
        except state_files.DamagedFileError as error:
            raise BackendError(str(error)) from None
        if app is None:
            return None
        return app, reduce(app)

    def list(self, options: Cfg) -> list[tuple[S, AppStatus]]:
        """Read the state of all apps, the newest first; ``options`` as for ``Backend.snapshots``."""
        apps = sorted(self.backend.snapshots(options), key=lambda app: app.created, reverse=True)
        return [(app, reduce(app)) for app in apps]

    def lines(
        self,
        app_id: str,
        role: str,
        replica: int,
        *,
        since: datetime | None,
        until: datetime | None,
        follow: bool,
        stream: Stream | None,
    ) -> Iterable[str]:
        """Return the lines of one replica, as ``TimedLines`` has them; a log with a limit ``until`` is not followed.

        The arguments are those of TorchX's ``Scheduler.log_iter``.

        Raises:
            UserError: the app, role or replica does not exist, or the backend does not keep the streams apart.
        """
        stream = None if stream is Stream.COMBINED else stream
        if stream is not None and not self.backend.capabilities.separate_streams:
            reason = f"{stream.value} alone is not there"
            raise UserError(f"{self._scheduler} keeps both streams of a replica as one; {reason}")
        found = self.recent(app_id)
        if found is None:
            raise UserError(f"there is no app {app_id!r} of {self._scheduler}")
        app, status = found
        if replica and any(at.spec.allocation for at in app.roles if at.spec.name == role):
            return ()  # what the ranks of all hosts have printed is in the log of replica 0
        sizes = {role_snapshot.spec.name: len(role_snapshot.replicas) for role_snapshot in app.roles}
        if role not in sizes:
            raise UserError(f"app {app_id} has no role {role!r}; its roles are {', '.join(sizes)}")
        if not 0 <= replica < sizes[role]:
            raise UserError(f"role {role} of app {app_id} has no replica {replica}; it has 0 to {sizes[role] - 1}")
        follow = follow and until is None and not status.state.is_terminal
        query = self._query(app_id, since=since, until=until, stream=stream.value if stream else "", follow=follow)
        return (lines.text for lines in self.backend.read_log(app, role, replica, query))

    def replica_log(self, app: S, role: str, replica: int, **query_fields: Any) -> Iterable[TimedLines]:
        """Return the lines of one replica, both streams together, with their times; arguments as in ``LogQuery``."""
        query = self._query(app.app_id, **query_fields)
        return self.backend.read_log(app, role, replica, query)

    def _query(self, app_id: str, **lines: Any) -> LogQuery[S]:
        return LogQuery(
            latest=lambda: latest[0] if (latest := self.recent(app_id)) else None,
            has_ended=lambda: self.has_ended(app_id),
            **lines,
        )

    def recent(self, app_id: str) -> tuple[S, AppStatus] | None:
        """Return a state that is at most ``Backend.poll`` seconds old; None if the app does not exist.

        Followers of logs share it: `torchx log` reads 500 replicas in 500 threads.
        """
        with self._locks.setdefault(app_id, threading.Lock()):
            when, found = self._latest.get(app_id, (0.0, None))
            if found is None or time.monotonic() > when + self.backend.poll:
                found = self.read(app_id, brief=True)
                self._latest[app_id] = time.monotonic(), found
            return found

    def has_ended(self, app_id: str) -> bool:
        """Return whether an app has ended or does not exist."""
        ended = self.backend.has_ended(app_id)
        if ended is not None:
            return ended
        found = self.recent(app_id)
        return found is None or found[1].state.is_terminal

    def wait(self, app_id: str, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the end of an app; return whether it has ended or does not exist."""
        deadline = time.monotonic() + timeout
        while not self.has_ended(app_id):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.backend.await_change(app_id, left)
        return True

    def cancel(self, app_id: str, grace: float | None = None, reason: str = "", *, waits: bool = False) -> None:
        """Begin to end an app and return immediately; do nothing if it has ended or does not exist.

        Args:
            grace: as for ``Backend.stop``.
            reason: for users; empty if the user has asked for it.
            waits: wait for its end if the backend's users expect that of `torchx cancel`.

        Raises:
            BackendError: the app has not ended in time; it is still being ended.
        """
        found = self.read(app_id, brief=True)
        if found is None or not self._stop(*found, grace, reason):
            return
        if waits and self.backend.capabilities.waits_for_cancel and not self.wait(app_id, _end_timeout(found[0])):
            raise BackendError(
                f"app {app_id} was asked to end, but has not ended within {_end_timeout(found[0]):.0f} s; "
                f"`torchx monarch status {self._scheduler}://torchx/{app_id}` shows what is left"
            )

    def _stop(self, app: S, status: AppStatus, grace: float | None, reason: str = "") -> bool:
        """Begin to end an app; return False if it has ended already."""
        if status.state.is_terminal and not self.backend.still_runs(app):
            return False
        self.backend.stop(app, status.outcome or Outcome(State.CANCELLED, reason, time=time.time()), grace)
        return True

    def delete(self, app_id: str) -> None:
        """End an app, wait for that, and remove all that the backend stores of it; nothing if it does not exist.

        Raises:
            BackendError: the app did not end; it is kept.
        """
        found = self.read(app_id, brief=True)
        if found is None:
            return
        app, status = found
        if self.backend.capabilities.kills and self._stop(app, status, None):
            if not self.wait(app_id, _end_timeout(app)):
                raise BackendError(f"app {app_id} did not end after a stop request; it is kept")
            app, _ = self.read(app_id, brief=True) or found
        self.backend.remove(app)

    def address(self, app_id: str, role: str) -> str:
        """Return the address or host name of a role's replica 0 for clients; empty if it is not known (yet)."""
        found = self.read(app_id, brief=True)
        replicas = found[0].replicas if found else ()
        return next((r.address or r.hostname for r in replicas if r.role == role and r.id == 0), "")


def _end_timeout(app: AppSnapshot) -> float:
    return app.grace + HOST_EXTRA + _END_EXTRA
