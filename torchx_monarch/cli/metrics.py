# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch metrics``: what a job has reported over time (``torchx_monarch.progress``), as CSV or JSON."""

from __future__ import annotations

import argparse
import csv
import sys

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.arguments import HELP
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.output import print_json
from torchx_monarch.schedulers.job_metrics import read_metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("handle", metavar="HANDLE", help=HELP)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these metrics (default: all)")
    parser.add_argument("--rank", type=int, metavar="K", help="this rank (default: the first that has reported some)")


def run(args: argparse.Namespace) -> None:
    """Print the metrics; exit with ``UNAVAILABLE`` if nothing was reported, or this machine does not have it."""
    with opened_job(args.handle) as job:
        facts = job.read()
    folder = facts.status.log_folder
    found = facts.metrics if args.rank is None else read_metrics(folder, facts.timeline, args.rank)
    if not found:
        what = "reported no progress" if folder else "its logs on other machines, and so its metrics"
        who = f"rank {args.rank}" if args.rank is not None and folder else args.handle
        raise CommandError(f"{who} has {what}", exit_codes.UNAVAILABLE)
    known = list(dict.fromkeys(name for attempt in found for point in attempt.points for name in point.metrics))
    if wrong := [name for name in args.names if name not in known]:
        raise UserError(f"{args.handle} has no metric {wrong[0]!r}; it has {', '.join(known) or 'none'}")
    names = args.names or known
    found = [attempt.only(names) for attempt in found]
    if args.json:
        print_json([attempt.to_json() for attempt in found])
        return
    rows = csv.writer(sys.stdout, lineterminator="\n")
    titles = [title for name in names for title in (name, f"{name}_min", f"{name}_max")]
    rows.writerow(["role", "run", "attempt", "rank", "step", "time", *titles])
    for attempt in found:
        for point in attempt.points:
            cells: list[object] = [attempt.role, attempt.run or "", attempt.attempt, attempt.rank, point.step]
            cells.append(f"{point.time:.3f}")
            for name in names:
                low, high, last = point.metrics.get(name, ("", "", ""))
                cells += last, low, high
            rows.writerow(cells)
