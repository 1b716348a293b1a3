# SPDX-License-Identifier: BSD-3-Clause
"""Open the scheduler of a job, and read the whole history of the job: its status, its events and its timeline."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.backends.core.state import AppStatus
from torchx_monarch.cli.handles import unknown
from torchx_monarch.client.connection import ask
from torchx_monarch.client.target import Target
from torchx_monarch.insight import timeline
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.timeline import Timeline
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.schedulers import job_status, registered
from torchx_monarch.schedulers.description import log_folder
from torchx_monarch.schedulers.job_status import JobStatus, LiveState
from torchx_monarch.schedulers.monarch import MonarchScheduler

_MAX_LINES = 100_000
"""Progress lines that are read of one log: a rank can imitate them."""

PATIENCE = 3.0
"""Seconds to wait for the connection to replica 0, and again for its answer."""


@dataclass(frozen=True)
class JobHistory:
    """What is known of a job from its submission on.

    Attributes:
        from_log: whether progress lines stand for its events, which this machine does not have.
    """

    app: AppSnapshot
    decided: AppStatus
    status: JobStatus
    timeline: Timeline
    from_log: bool


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


def read_app(scheduler: MonarchScheduler, handle: str, app_id: str) -> tuple[AppSnapshot, AppStatus]:
    """Return the snapshot and the state of an app.

    Raises:
        HandleError: there is no such app.
        BackendError: its scheduler cannot be reached.
    """
    found = scheduler.apps.read(app_id)
    if found is None:
        raise unknown(handle)
    return found


def ask_live(target: Target) -> LiveState | None:
    """Return what the hosts of a live allocation answer, without their runs; None if they are of another job."""
    answer = ask(target, {"type": "look"}, PATIENCE)
    live = answer.get("live")
    if live is None:
        return None
    facts = {name: live[name] for name in ("ready", "run", "runs", "queued", "idle", "idle_timeout")}
    return LiveState(hosts=len(answer["hosts"]), **facts)


def read_history(handle: str) -> JobHistory:
    """Return the history of a job; raise as ``opened`` and ``read_app`` do."""
    scheduler_name, app_id = app_id_of(handle)
    with opened(scheduler_name) as scheduler:
        app, decided = read_app(scheduler, handle, app_id)
        now = time.time()
        recorded = scheduler.read_events(app_id)
        happened = recorded or _events_of_logs(scheduler, app)
    status = job_status.build(
        handle, app, decided, happened, now=now, log_folder=log_folder(app), from_log=not recorded
    )
    if not recorded and status.started:
        started = {"time": status.started, "kind": "job_started", "message": "the job started"}
        happened = [started, *(event for event in happened if event["time"] >= status.started)]
    live = [role.spec.name for role in app.roles if role.spec.workload is WorkloadKind.SESSION]
    drawn = timeline.build(
        happened,
        [role.spec.name for role in app.roles],
        start=status.submitted or status.started or 0.0,
        end=status.ended or now,
        live=live,
    )
    return JobHistory(app, decided, status, drawn, not recorded)


def _events_of_logs(scheduler: MonarchScheduler, app: AppSnapshot) -> list[Event]:
    """Return the events that the progress lines in the log of each role's replica 0 stand for."""
    found: list[Event] = []
    for role in app.roles:
        with contextlib.suppress(BackendError, UserError):
            lines = scheduler.apps.replica_log(app, role.spec.name, 0)
            marked = (line for line in lines if "[monarch]" in line.text)
            happened = job_status.events_of(itertools.islice(marked, _MAX_LINES))
            found += [{**event, "role": role.spec.name} for event in happened if event["time"]]
    return found
