# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch status``: all that is known of a job, once or until its end."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.jobs import PATIENCE, SAMPLE_PAUSE_S, opened_job
from torchx_monarch.cli.output import add_json, print_json, print_record
from torchx_monarch.cli.status_text import render
from torchx_monarch.schedulers.job_status import JobStatus

_INTERVAL_S = 1.0
"""Time between two readings of a job that is watched, if its backend does not want more."""

_INDENT = " " * 15
"""What stands before the facts of a status."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="show it again and again until the job has ended")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the status of a job; with ``--watch`` each time that it changes, until its end."""
    with opened_job(args.handle, timeout=PATIENCE) as job:
        if args.watch:
            watch((facts.status for facts in job.watch(_INTERVAL_S, SAMPLE_PAUSE_S)), args.json)
            return
        status = job.read(SAMPLE_PAUSE_S).status
    print_json(status.to_json()) if args.json else print(render(status))


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
