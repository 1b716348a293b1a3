# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch status``: all that is known of a job, once or until its end."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot
from torchx_monarch.backends.core.state import AppStatus
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.jobs import PATIENCE, app_id_of, ask_live, opened, read_app
from torchx_monarch.cli.output import add_json, print_json, print_record
from torchx_monarch.cli.status_text import render
from torchx_monarch.client.connection import Connection
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.rank_queries import RankWatch
from torchx_monarch.client.runs import RUNS, read_runs
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.insight.log_lines import host_text
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.description import log_folder, summary_of
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

_RUNS_SHOWN = 10

_INDENT = " " * 15
"""What stands before the facts of a status."""

_WITH_RANKS = (WorkloadKind.RANKS, WorkloadKind.SESSION)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="show it again and again until the job has ended")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the status of a job; with ``--watch`` each time that it changes, until its end."""
    scheduler_name, app_id = app_id_of(args.handle)
    with opened(scheduler_name) as scheduler:
        found = statuses(scheduler, args.handle, app_id)
        if args.watch:
            watch(found, args.json)
        elif args.json:
            print_json(next(found).to_json())
        else:
            print(render(next(found)))


def watch(found: Iterator[JobStatus], as_json: bool) -> None:
    """Show a status whenever it changes; on a terminal every time, in place of the one before."""
    in_place = not as_json and sys.stdout.isatty()
    shown, height = "", 0
    for status in found:
        # The facts without those that change with the clock alone.
        live = status.live and replace(status.live, idle=0)
        facts = repr(replace(status, elapsed=None, last_output=None, live=live, activity=None))
        if in_place:
            size = shutil.get_terminal_size()
            width, rows = max(2 * len(_INDENT), size.columns), size.lines
            lines = render(status).split("\n")
            if not status.has_ended:  # what the terminal wraps, or scrolls, would not be erased
                wrapped = (
                    textwrap.wrap(line, width, subsequent_indent=_INDENT, break_on_hyphens=False) for line in lines
                )
                lines = [line for parts in wrapped for line in parts][: max(1, rows - 1)]
            print(f"\x1b[{height}A\x1b[J" if height else "", "\n".join(lines), sep="", flush=True)
            height = len(lines)
        elif facts != shown:
            print_record(status.to_json()) if as_json else print(render(status), end="\n\n", flush=True)
        shown = facts


def statuses(scheduler: MonarchScheduler, handle: str, app_id: str) -> Iterator[JobStatus]:
    """Yield the status of a job again and again, until its end; with the ranks of the first role that has some."""
    ranks: RankWatch | None = None
    while True:
        app, decided = read_app(scheduler, handle, app_id)
        status = _status(scheduler, handle, app, decided)
        first = next((role.spec for role in app.roles if role.spec.workload in _WITH_RANKS), None)
        if status.phase == "running" and first is not None:
            ranks = ranks or RankWatch(Hosts(handle, first.name))
            with contextlib.suppress(UnreachableError, RefusedError, AllocationError, BackendError):
                status = replace(status, activity=ranks.ask(_INTERVAL_S, PATIENCE)[0] or None)
        yield status
        if status.has_ended:
            return
        time.sleep(max(_INTERVAL_S, scheduler.inner.poll))


def _status(scheduler: MonarchScheduler, handle: str, app: AppSnapshot, decided: AppStatus) -> JobStatus:
    happened, last_output, live, from_log = scheduler.read_events(app.app_id), 0.0, None, False
    if decided.state is State.RUNNING:
        logs = _ends_of_logs(scheduler, app)
        output = (line for lines in logs for line in lines if host_text(line.text) is None)
        last_output = max((line.time for line in output), default=0.0)
        if from_log := not happened and bool(logs):
            happened = events_of(logs[0])
        live = _live(handle, app)
    status = build(
        handle,
        app,
        decided,
        happened,
        last_output=last_output,
        log_folder=log_folder(app),
        live=live,
        from_log=from_log,
    )
    if not status.has_ended:
        return status
    return replace(status, summary=summary_of(handle, app, decided, status.submitted or 0.0, time.time()))


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
    role = next((role.spec.name for role in app.roles if role.spec.workload is WorkloadKind.SESSION), None)
    if role is None:
        return None
    with contextlib.suppress(UnreachableError, RefusedError, TimeoutError):
        target = Target.from_handle(handle, role)
        if (live := ask_live(target)) is not None:
            with Connection.open(target, RUNS) as link:
                return replace(live, last_runs=tuple(read_runs(link, PATIENCE)[-_RUNS_SHOWN:]))
    return None
