# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch ps``: list the runs of a live allocation."""

from __future__ import annotations

import argparse
import time

from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.output import print_json, print_table
from torchx_monarch.system.untrusted_text import one_line

_START_TIMEOUT = 15.0
"""Seconds to wait for hosts that do not answer. Commands that use hosts wait longer for their start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)


def run(args: argparse.Namespace) -> None:
    runs, rows = hosts_of(args, _START_TIMEOUT).runs(), []
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
