# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch ls``: list the jobs of all schedulers that were used from this machine, or of one."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.cli.arguments import count
from torchx_monarch.cli.doctor import run_groups
from torchx_monarch.cli.output import print_json, print_table
from torchx_monarch.cli.status import shape_of
from torchx_monarch.client.hosts import say
from torchx_monarch.insight.log_lines import is_terminal
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.schedulers.job_status import JobStatus, build
from torchx_monarch.schedulers.monarch import MonarchScheduler, opened
from torchx_monarch.schedulers.recorded_apps import LOCAL, RecordedApp, recorded_apps
from torchx_monarch.schedulers.run_options import with_stored
from torchx_monarch.system.untrusted_text import one_line

_MIN_WIDTH = 12
"""The fewest characters of a name or an id that are shown."""

_SHOWN = 50
"""Jobs that are listed for people."""

_PATIENCE = 20.0
"""Seconds to wait for a scheduler."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-s", "--scheduler", help="only this scheduler (default: all that were used from this machine)")
    parser.add_argument(
        "-n",
        "--limit",
        type=count,
        metavar="N",
        help="only the newest N; 0: all (default: 50, and all with --json)",
    )


def run(args: argparse.Namespace) -> None:
    default = 0 if args.json else _SHOWN
    jobs, older = read_jobs(args.scheduler, default if args.limit is None else args.limit)
    if args.json:
        print_json([job.to_json() for job in jobs])
        return
    _print(jobs)
    if older:
        say(f"{older} older jobs are not shown; --limit 0 lists all")


def read_jobs(scheduler: str | None = None, limit: int = 0) -> tuple[list[JobStatus], int]:
    """Return the newest jobs of a scheduler, or of all, the newest first, and the number of older ones.

    Args:
        limit: the most jobs to return; 0 for all.
    """
    apps = recorded_apps()
    local = [app.app_id for app in apps if app.scheduler == LOCAL and scheduler in (None, LOCAL)]
    read = local[:limit] if limit else local
    found = [*_jobs(scheduler, read)] if scheduler else _all_jobs(apps, read)
    found.sort(key=lambda job: job.submitted or 0.0, reverse=True)
    shown = found[:limit] if limit else found
    return shown, len(found) - len(shown) + len(local) - len(read)


def _jobs(name: str, local: Sequence[str]) -> Iterator[JobStatus]:
    """Yield the jobs of a scheduler, in any order; of ``monarch_local`` those with these ids.

    The folders of jobs on this machine may be tens of thousands: it reads those that are shown.
    """
    with opened(name) as scheduler:
        read = (scheduler.apps.read(app_id, brief=True) for app_id in local)
        for found in read if name == LOCAL else scheduler.apps.list(with_stored({}, name)):
            if found is not None:
                job = build(f"{name}://torchx/{found[0].app_id}", *found, now=time.time())
                yield replace(job, replicas=None)


def _all_jobs(apps: list[RecordedApp], local: Sequence[str]) -> list[JobStatus]:
    """Return the jobs of all schedulers, asked at the same time; say in one line if one of them does not answer."""
    used = [LOCAL, *sorted({app.scheduler for app in apps} - {LOCAL})]
    answers = run_groups({name: functools.partial(_jobs, name, local) for name in used}, _PATIENCE)
    for name, (_, failure) in answers.items():
        if failure:
            say(f"{name} is left out: {one_line(failure, 160)}")
    return [found for answer, _ in answers.values() for found in answer]


def used_schedulers(only: str | None = None) -> Iterator[tuple[str, MonarchScheduler]]:
    """Yield each scheduler that was used from this machine, or one alone; say which cannot be used now."""
    for name in [only] if only else sorted({app.scheduler for app in recorded_apps()}):
        try:
            with opened(name) as scheduler:
                yield name, scheduler
        except (BackendError, UserError) as error:  # such as one that another folder's .torchxconfig has wrapped
            if only:
                raise
            say(f"{name} is left out: {one_line(str(error), 160)}")


def _print(jobs: Sequence[JobStatus]) -> None:
    now = time.time()
    places = [job.handle.partition("://torchx/") for job in jobs]
    columns = {
        "ID": [one_line(app_id) for _, _, app_id in places],
        "NAME": [one_line(job.name) for job in jobs],
        "STATE": [job.state for job in jobs],
        "AGE": ["" if job.submitted is None else show_duration(now - job.submitted) for job in jobs],
        "TIME": ["" if job.elapsed is None else show_duration(job.elapsed) for job in jobs],
        "CODE": ["" if job.exit_code is None else str(job.exit_code) for job in jobs],
        "HOSTS": [shape_of(job) for job in jobs],
        "SCHEDULER": [scheduler for scheduler, _, _ in places],
    }
    if all(job.name in app_id for job, (_, _, app_id) in zip(jobs, places, strict=True)):
        del columns["NAME"]
    if len(set(columns["SCHEDULER"])) < 2:
        del columns["SCHEDULER"]
    if is_terminal(sys.stdout):
        _fit(columns, shutil.get_terminal_size().columns)
    print_table([*columns], [list(row) for row in zip(*columns.values(), strict=True)])


def _fit(columns: dict[str, list[str]], width: int) -> None:
    """Cut names, and then ids, so that no row is wider than the terminal."""
    for title in ("NAME", "ID"):
        widths = {name: max(map(len, [name, *cells])) for name, cells in columns.items()}
        excess = sum(widths.values()) + 2 * (len(widths) - 1) - width
        if title in columns and excess > 0:
            room = max(_MIN_WIDTH, widths[title] - excess)
            columns[title] = [cell if len(cell) <= room else f"{cell[: room - 1]}…" for cell in columns[title]]
