# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch wait``: wait for the end of a job, print how it ended, and exit with its exit code."""

from __future__ import annotations

import argparse
import sys
import time

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.output import add_json, print_json
from torchx_monarch.cli.status_text import render

_INTERVAL_S = 1.0
"""Time between two readings of the job, if its backend does not want more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="exit with 124 if the job has not ended then")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Wait, print the status, and exit with the job's exit code; with 1 for a job that failed without one."""
    deadline = None if args.timeout is None else time.monotonic() + args.timeout
    with opened_job(args.handle) as job:
        while not (state := job.read_app()[1].state).is_terminal:
            left = float("inf") if deadline is None else deadline - time.monotonic()
            if left <= 0:
                text = f"{args.handle} has not ended within {args.timeout:g} s: {state.value}"
                raise CommandError(text, exit_codes.TIMEOUT)
            time.sleep(min(max(_INTERVAL_S, job.scheduler.inner.poll), left))
        status = job.read().status
    print_json(status.to_json()) if args.json else print(render(status))
    sys.exit(status.exit_code if status.exit_code is not None else int(status.state != "SUCCEEDED"))
