# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch ps``: list live allocations, or the runs of one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.handles import LOCAL, recorded_apps
from torchx_monarch.cli.jobs import ask_live
from torchx_monarch.cli.ls import ask_all, list_apps
from torchx_monarch.cli.output import add_json, print_json, print_table
from torchx_monarch.client.connection import Target, recorded_roles
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.job_status import LiveState
from torchx_monarch.system.untrusted_text import one_line

_MAX_ASKED = 64
"""Allocations that are asked at the same time."""

_START_TIMEOUT = 15.0
"""Seconds to wait for hosts that do not answer. Commands that use hosts wait longer for their start."""

Allocation = tuple[str, str, LiveState | State]
"""The handle of an app, one of its roles, and what replica 0 of the role has answered, or if it has not, the state of
the app."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser, default=None)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print a table of the allocations, or of the runs of one."""
    if args.handle is None:
        allocations = list_allocations()
        if args.json:
            print_json([_to_json(*allocation) for allocation in allocations])
        else:
            rows = [_row(*allocation) for allocation in allocations]
            print_table(["HANDLE", "ROLE", "HOSTS", "STATE", "RUNS", "IDLE"], rows)
        return
    hosts, rows = hosts_of(args, _START_TIMEOUT), []
    if (status := hosts.ask_status()) is not None and status.message:
        raise AllocationError(f"{status.message}, and has no runs; its state: torchx monarch status {args.handle}")
    runs = hosts.runs()
    if args.json:
        print_json(runs)
        return
    for run in runs:
        code = "" if run["exit_code"] is None else str(run["exit_code"])
        seconds = (run["ended"] or time.time()) - run["started"] if run["started"] else 0.0
        by, source, command = (
            one_line(text) for text in (run["by"], run["code"][:12], " ".join(run["command"].split()))
        )
        rows.append([str(run["run"]), run["state"], code, f"{seconds:.1f} s", by, source, command])
    print_table(["RUN", "STATE", "CODE", "TIME", "BY", "SOURCE", "COMMAND"], rows)


def list_allocations() -> Iterator[Allocation]:
    """Yield the allocations of this machine's records that answer, then those that have not ended all the same."""
    apps = sorted(recorded_apps(), key=lambda app: (app.scheduler != LOCAL, app.handle))
    roles = [(app.handle, role) for app in apps for role in recorded_roles(app.scheduler, app.app_id)]
    # All at once: each that is silent takes `jobs.PATIENCE`.
    with ThreadPoolExecutor(_MAX_ASKED) as threads:
        answered = [found for found in threads.map(lambda role: _ask_allocation(*role), roles) if found]
    yield from answered
    silent = set(roles) - {found[:2] for found in answered}
    schedulers = {handle.partition("://")[0] for handle, _ in silent}
    yield from (found for found in ask_all(sorted(schedulers), _list_unended) if found[:2] in silent)


def _ask_allocation(handle: str, role: str) -> Allocation | None:
    """Ask replica 0 of a role; return None if it does not answer, or is not of an allocation."""
    with contextlib.suppress(UnreachableError, RefusedError):
        if (live := ask_live(Target.from_handle(handle, role))) is not None:
            return handle, role, live
    return None


def _list_unended(scheduler: str) -> list[Allocation]:
    """Return the allocations of a scheduler that have not ended, with the states of their apps."""
    return [
        (f"{scheduler}://torchx/{app.app_id}", role.spec.name, status.state)
        for app, status in list_apps(scheduler)
        for role in app.roles
        if role.spec.workload is WorkloadKind.SESSION and not status.state.is_terminal
    ]


def _to_json(handle: str, role: str, live: LiveState | State) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(LiveState) if field.name != "last_runs"]
    return {"handle": handle, "role": role, **{name: getattr(live, name, None) for name in names}}


def _row(handle: str, role: str, live: LiveState | State) -> list[str]:
    if isinstance(live, State):
        state = "queued" if live is State.PENDING else "does not answer"
        return [one_line(handle), one_line(role), "", state, "", ""]
    state = f"run {live.run}" if live.run else "ready" if live.ready else "starting"
    limit = f" of {live.idle_timeout:.0f}" if live.idle_timeout else ""
    idle = f"{live.idle:.0f}{limit} s"
    return [one_line(handle), one_line(role), str(live.hosts), state, str(live.runs), idle]
