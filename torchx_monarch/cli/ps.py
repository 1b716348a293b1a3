# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch ps``: list live allocations, or the runs of one."""

from __future__ import annotations

import argparse
import time

from torchx_monarch.cli.allocation_arguments import add_handle, job_of
from torchx_monarch.cli.table import print_table
from torchx_monarch.client.allocations import AllocationInfo, list_allocations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch ps``."""
    add_handle(parser, optional=True)


def run(args: argparse.Namespace) -> None:
    """Print a table of the allocations, or of the runs of one."""
    if args.handle is None:
        print_table(["HANDLE", "ROLE", "HOSTS", "STATE", "RUNS", "IDLE"], [_row(found) for found in list_allocations()])
        return
    rows = []
    for run in job_of(args).runs():
        code = "" if run["exit_code"] is None else str(run["exit_code"])
        seconds = (run["ended"] or time.time()) - run["started"] if run["started"] else 0.0
        command = " ".join(run["command"].split())
        rows.append([str(run["run"]), run["state"], code, f"{seconds:.1f} s", run["by"], run["code"][:12], command])
    print_table(["RUN", "STATE", "CODE", "TIME", "BY", "SOURCE", "COMMAND"], rows)


def _row(found: AllocationInfo) -> list[str]:
    live = found.live
    state = f"run {live['run']}" if live["run"] else "ready" if live["ready"] else "starting"
    limit = f" of {live['idle_timeout']:.0f}" if live["idle_timeout"] else ""
    return [found.handle, live["role"], str(found.hosts), state, str(live["runs"]), f"{live['idle']:.0f}{limit} s"]
