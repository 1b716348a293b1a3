# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch status``: all that is known of a job, once or until its end."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.jobs import app_id_of, opened, read_app
from torchx_monarch.cli.output import add_json, print_json, print_record
from torchx_monarch.cli.status_text import render
from torchx_monarch.client.connection import Connection
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.rank_queries import RankWatch
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.insight.log_lines import host_text
from torchx_monarch.insight.rank_view import RankView
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.description import log_folder
from torchx_monarch.schedulers.job_status import JobStatus, LiveState, build, events_of
from torchx_monarch.schedulers.monarch import MonarchScheduler

_INTERVAL_S = 1.0
"""Time between two readings of a job that is watched, if its backend does not want more, and between the two samples
of its ranks of which rates follow."""

_TAIL = 200
"""Lines at the end of a replica's log in which its last output and its host's progress are looked for."""

_MAX_LOGS = 64
"""Replicas whose logs are read for the last output; each may cost a request."""

_AT_A_TIME = 16

_PATIENCE = 3.0
"""Seconds to wait for the connection to replica 0, and again for its answer."""

_RUNS_SHOWN = 10

_WITH_RANKS = (WorkloadKind.RANKS, WorkloadKind.SESSION)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch status``."""
    add_handle(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="show it again and again until the job has ended")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the status of a job; with ``--watch`` each time that it changes, until its end."""
    scheduler_name, app_id = app_id_of(args.handle)
    with opened(scheduler_name) as scheduler:
        status = _read_status(scheduler, args.handle, app_id, ranks := _Ranks(args.handle))
        if not args.watch:
            print_json(status.to_json()) if args.json else print(render(status))
            return
        _watch(scheduler, status, app_id, ranks, args.json)


class _Ranks:
    """Ask again and again what the ranks of a job do: the same ``Hosts``, which ask the scheduler every few seconds."""

    def __init__(self, handle: str) -> None:
        self._handle = handle
        self._hosts: Hosts | None = None
        self._watch = RankWatch()

    def ask(self, role: str) -> list[RankView] | None:
        """Return what each rank of a role does; None if the hosts do not answer, or there are no ranks."""
        self._hosts = self._hosts or Hosts(self._handle, role)
        with contextlib.suppress(UnreachableError, RefusedError, AllocationError, BackendError):
            return self._watch.ask(self._hosts, _INTERVAL_S, _PATIENCE)[0] or None
        return None


def _watch(scheduler: MonarchScheduler, status: JobStatus, app_id: str, ranks: _Ranks, as_json: bool) -> None:
    """Show a status whenever it changes; on a terminal every time, in place of the one before."""
    in_place = not as_json and sys.stdout.isatty()
    shown, height = "", 0
    while True:
        # The facts without those that change with the clock alone.
        live = status.live and replace(status.live, idle=0)
        facts = repr(replace(status, elapsed=None, last_output=None, live=live, activity=None))
        if in_place:
            width, rows = shutil.get_terminal_size()
            lines = render(status).split("\n")
            if not status.has_ended:  # what wraps or scrolls would not be erased
                lines = [line[:width] for line in lines[: max(1, rows - 1)]]
            print(f"\x1b[{height}A\x1b[J" if height else "", "\n".join(lines), sep="", flush=True)
            height = len(lines)
        elif facts != shown:
            print_record(status.to_json()) if as_json else print(render(status), end="\n\n", flush=True)
        shown = facts
        if status.has_ended:
            return
        time.sleep(max(_INTERVAL_S, scheduler.inner.poll))
        status = _read_status(scheduler, status.handle, app_id, ranks)


def _read_status(scheduler: MonarchScheduler, handle: str, app_id: str, ranks: _Ranks) -> JobStatus:
    """Return the status of a job.

    Args:
        ranks: the earlier samples of its ranks; those of the first role with ranks are taken.
    """
    app, status = read_app(scheduler, handle, app_id)
    happened, last_output, live, from_log = scheduler.read_events(app_id), 0.0, None, False
    if status.state is State.RUNNING:
        logs = _ends_of_logs(scheduler, app)
        output = (line for lines in logs for line in lines if host_text(line.text) is None)
        last_output = max((line.time for line in output), default=0.0)
        if from_log := not happened and bool(logs):
            happened = events_of(logs[0])
        live = _live(handle, app)
    built = build(
        handle,
        app,
        status,
        happened,
        last_output=last_output,
        log_folder=log_folder(app),
        live=live,
        from_log=from_log,
    )
    first = next((role.spec for role in app.roles if role.spec.workload in _WITH_RANKS), None)
    if built.phase != "running" or first is None:
        return built
    return replace(built, activity=ranks.ask(first.name))


def _ends_of_logs(scheduler: MonarchScheduler, app: AppSnapshot) -> list[list[TimedLine]]:
    """Return the last lines of the replicas' logs, those of replica 0 first; none of a log that cannot be read."""

    def end_of(replica: ReplicaSnapshot) -> list[TimedLine]:
        with contextlib.suppress(BackendError, UserError):
            return list(deque(scheduler.apps.replica_log(app, replica.role, replica.id, tail=_TAIL), maxlen=_TAIL))
        return []

    replicas = [replica for replica in app.replicas if replica.started or replica.state is State.RUNNING][:_MAX_LOGS]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return list(pool.map(end_of, replicas))


def _live(handle: str, app: AppSnapshot) -> LiveState | None:
    """Ask the hosts of a live allocation; return None for another job, and if they do not answer."""
    from torchx_monarch.client.allocations import ask_live
    from torchx_monarch.client.runs import RUNS, read_runs

    role = next((role.spec.name for role in app.roles if role.spec.workload is WorkloadKind.SESSION), None)
    if role is None:
        return None
    with contextlib.suppress(UnreachableError, RefusedError, TimeoutError):
        target = Target.from_handle(handle, role)
        if (live := ask_live(target)) is not None:
            with Connection.open(target, RUNS) as link:
                return replace(live, last_runs=tuple(read_runs(link, _PATIENCE)[-_RUNS_SHOWN:]))
    return None
