# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch ps``: list live allocations, or the runs of one."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.output import add_json, print_json, print_table
from torchx_monarch.client.allocations import AllocationInfo, list_allocations
from torchx_monarch.client.hosts import say
from torchx_monarch.client.runs import list_runs
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch ps``."""
    add_handle(parser, default=None)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print a table of the allocations, or of the runs of one."""
    if args.json:
        found = list_runs(hosts_of(args)) if args.handle is not None else map(_to_json, list_allocations())
        print_json(list(found))
        return
    if args.handle is None:
        print_table(["HANDLE", "ROLE", "HOSTS", "STATE", "RUNS", "IDLE"], [_row(found) for found in list_allocations()])
        return
    hosts, rows = hosts_of(args), []
    runs = list_runs(hosts)
    if hosts.end_reason:
        say(f"{hosts.handle} {hosts.end_reason}")
    for run in runs:
        code = "" if run["exit_code"] is None else str(run["exit_code"])
        seconds = (run["ended"] or time.time()) - run["started"] if run["started"] else 0.0
        by, source, command = (
            one_line(text) for text in (run["by"], run["code"][:12], " ".join(run["command"].split()))
        )
        rows.append([str(run["run"]), run["state"], code, f"{seconds:.1f} s", by, source, command])
    print_table(["RUN", "STATE", "CODE", "TIME", "BY", "SOURCE", "COMMAND"], rows)


def _to_json(found: AllocationInfo) -> dict[str, Any]:
    live = dataclasses.asdict(found.live)
    del live["last_runs"]
    return {"handle": found.handle, "role": found.role, **live}


def _row(found: AllocationInfo) -> list[str]:
    live = found.live
    state = f"run {live.run}" if live.run else "ready" if live.ready else "starting"
    limit = f" of {live.idle_timeout:.0f}" if live.idle_timeout else ""
    return [
        one_line(found.handle),
        one_line(found.role),
        str(live.hosts),
        state,
        str(live.runs),
        f"{live.idle:.0f}{limit} s",
    ]
