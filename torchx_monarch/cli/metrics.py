# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch metrics``: what a job has reported over time (``torchx_monarch.progress``), as CSV or JSON."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.arguments import HELP
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.output import print_json
from torchx_monarch.schedulers.job_metrics import AttemptMetrics, read_activity, read_metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("handle", metavar="HANDLE", help=HELP)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help="only these metrics (default: all)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--activity", action="store_true", help="what all ranks did: processor, memory, GPUs, lateness")
    whose.add_argument("--rank", type=int, metavar="K", help="this rank (default: the first that has reported some)")


def run(args: argparse.Namespace) -> None:
    """Print the metrics; exit with ``UNAVAILABLE`` if nothing was reported, or this machine does not have it."""
    with opened_job(args.handle) as job:
        facts = job.read()
    folder = facts.status.log_folder
    found: Sequence[AttemptMetrics]
    if args.activity:
        found = read_activity(folder, facts.timeline)
    else:
        found = facts.metrics if args.rank is None else read_metrics(folder, facts.timeline, args.rank)
    if not found:
        has_logs = folder and all(role.spec.allocation_logs or not role.spec.allocation for role in facts.app.roles)
        nothing = "no ranks that ran for ten seconds" if args.activity else "reported no progress"
        what = nothing if has_logs else "its logs on other machines, and so its metrics"
        who = f"rank {args.rank}" if args.rank is not None and has_logs else args.handle
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
    parts = ("", "_min", "_max", "_outlier") if args.activity else ("", "_min", "_max")
    titles = ["role", "run", "attempt", "rank", "step", "time"]
    for title in (f"{name}{part}" for name in names for part in parts):
        while title in titles:
            title = f"metric_{title}"
        titles.append(title)
    rows.writerow(titles)
    for attempt in found:
        for point in attempt.points:
            cells: list[object] = [attempt.role, attempt.run or "", attempt.attempt, attempt.rank, point.step]
            cells.append(f"{point.time:.3f}")
            for name in names:
                low, high, last = point.metrics.get(name, ("", "", ""))
                cells += [last, low, high, *([point.outliers.get(name, "")] if args.activity else ())]
            rows.writerow(cells)
