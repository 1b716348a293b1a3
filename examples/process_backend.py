# SPDX-License-Identifier: BSD-3-Clause
"""A scheduler of your own, as small as it can be: hosts are child processes of the process that submits."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchx.schedulers.ids import make_unique
from torchx.specs import AppDef, Role, macros

from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery
from torchx_monarch.backends.core.options import NetworkOpts
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.schedulers.monarch import MonarchScheduler, create

Request = tuple[AppDef, float]  # what to run, and the seconds from SIGTERM to SIGKILL


class Replica:
    """A child process, its log, and the file in which its host writes its result."""

    def __init__(self, app: App, app_id: str, role: Role, id: int) -> None:
        self.role, self.id, self.ended, self.kill_at = role.name, id, 0.0, float("inf")
        self.log, self.result = (Path(app.folder.name, f"{role.name}-{id}.{kind}") for kind in ("log", "json"))
        self.result.touch()
        one = macros.Values(os.getcwd(), app_id, str(id), "TORCHX_RANK0_HOST").apply(role)
        env = {**app.env, **one.env, "MONARCH_TERMINATION_LOG": str(self.result)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([one.entrypoint, *one.args], env=env, stdout=log, stderr=log)
        atexit.register(self.process.kill)

    def snapshot(self) -> ReplicaSnapshot:
        """Return its state; kill it if its grace period is over."""
        code, stopped = self.process.poll(), self.kill_at < float("inf")
        if code is not None:
            self.ended = self.ended or time.time()
        elif time.time() > self.kill_at:
            self.process.kill()
        more = {"hostname": os.uname().nodename, "ended": self.ended}
        return ReplicaSnapshot.of_process(self.role, self.id, code, self.result.read_text(), stopped=stopped, **more)


class App:
    """A submitted app, whose processes this starts."""

    def __init__(self, app_id: str, request: Request, submitted: SubmittedApp, credentials: str) -> None:
        self.request, self.submitted, self.created = request, submitted, time.time()
        self.folder, self.env = tempfile.TemporaryDirectory(), {**os.environ, "MONARCH_CREDENTIALS": credentials}
        self.ending: Outcome | None = None
        self.replicas = {r.name: [Replica(self, app_id, r, k) for k in range(r.num_replicas)] for r in request[0].roles}


class ProcessBackend(Backend[NetworkOpts, Request, AppSnapshot]):
    """Starts each replica as a process, and restarts none."""

    options = NetworkOpts
    capabilities = Capabilities(separate_streams=False, shares_interpreter=True)
    apps: dict[str, App] = {}  # of all schedulers of this process

    def replica0_host(self, app: AppDef, role: int) -> str:
        """Return how hosts reach replica 0 of a role."""
        return "localhost"

    def render(self, app: AppDef, submitted: SubmittedApp, options: NetworkOpts) -> Request:
        """Return what to run."""
        return app, options.grace

    def submit(self, request: Request, submitted: SubmittedApp, credentials: str) -> str:
        """Start all processes."""
        app_id: str = make_unique(submitted.app.name)
        self.apps[app_id] = App(app_id, request, submitted, credentials)
        return app_id

    def snapshot(self, app_id: str, *, brief: bool = False) -> AppSnapshot | None:
        """Return the state of an app; None if it does not exist."""
        if (app := self.apps.get(app_id)) is None:
            return None
        user, grace = app.submitted.app, app.request[1]
        roles = [RoleSnapshot(s, [one.snapshot() for one in app.replicas[s.name]]) for s in app.submitted.roles]
        return AppSnapshot(app_id, user.name, roles, user, created=app.created, grace=grace, ending=app.ending)

    def snapshots(self, options: Cfg) -> Sequence[AppSnapshot]:
        """Return the states of all apps, the newest first."""
        return [app for app in map(self.snapshot, reversed(self.apps)) if app]

    def read_log(self, app: AppSnapshot, role: str, replica: int, query: LogQuery[AppSnapshot]) -> Iterator[TimedLine]:
        """Yield the lines of a log. They have no times, so ``query.since`` and ``query.until`` do not count."""
        with self.apps[app.app_id].replicas[role][replica].log.open() as log:
            while query.follow and not query.has_ended():
                yield from (TimedLine(0.0, line) for line in log)
                time.sleep(self.poll)
            yield from (TimedLine(0.0, line) for line in log)

    def stop(self, app: AppSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Send SIGTERM to all processes once, and set when they are killed; a later call can only advance that."""
        found = self.apps[app.app_id]
        found.ending = found.ending or outcome
        for replica in [found.replicas[one.role][one.id] for one in app.replicas if one.is_alive]:
            if replica.kill_at == float("inf"):
                replica.process.terminate()
            due = time.time() + (app.grace if grace is None else grace) + (HOST_EXTRA if grace != 0 else 0.0)
            replica.kill_at = min(replica.kill_at, due)

    def remove(self, app: AppSnapshot) -> None:
        """Forget an app, and remove its files."""
        self.apps.pop(app.app_id).folder.cleanup()


def create_scheduler(session_name: str, **kwargs: object) -> MonarchScheduler:
    """Create the scheduler, which a package registers: ``torchx.schedulers: NAME = MODULE:create_scheduler``."""
    return create("processes", session_name, ProcessBackend(), sys.executable)
