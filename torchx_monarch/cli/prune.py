# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch prune``: remove jobs that ended long ago, or have large logs on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.cli.arguments import since
from torchx_monarch.cli.ls import used_schedulers
from torchx_monarch.cli.output import print_json, print_table
from torchx_monarch.cli.top import show_bytes
from torchx_monarch.client.hosts import say
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.model.host_spec import parse_size
from torchx_monarch.schedulers.job_status import build
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.schedulers.recorded_apps import RecordedApp, recorded_apps
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older", type=since, metavar="AGE", help="jobs that ended longer ago: 12h, 2d, or a time")
    parser.add_argument("--larger", type=_size, metavar="SIZE", help="jobs whose folder is larger: 500M, 10G")
    parser.add_argument("-s", "--scheduler", help="only this scheduler (default: all that were used from this machine)")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> None:
    if args.older is None and args.larger is None:
        raise UserError("nothing says which jobs: use --older AGE, --larger SIZE, or both")
    removed: list[dict[str, Any]] = []
    apps = recorded_apps()
    for name, scheduler in used_schedulers(args.scheduler):
        for app in apps:
            try:
                if app.scheduler == name and (job := _chosen(scheduler, app, args)):
                    scheduler.delete(app.app_id)
                    removed.append(job)
            except BackendError as error:
                say(f"{app.handle} stays: {one_line(str(error), 300)}")
    if args.json:
        print_json(removed)
        return
    if removed:
        now = time.time()
        rows = [[job["handle"], show_duration(now - job["ended"]), show_bytes(job["bytes"])] for job in removed]
        print_table(["REMOVED", "ENDED AGO", "SIZE"], rows)
    jobs = f"{len(removed)} job{'' if len(removed) == 1 else 's'}"
    say(f"removed {jobs}: {show_bytes(sum(job['bytes'] for job in removed))}")


def _chosen(scheduler: MonarchScheduler, app: RecordedApp, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return a job as it is shown when it is removed; None for one that stays, or has no folder on this machine."""
    folder = scheduler.inner.folder(app.app_id)
    size = _bytes_of(folder.root) if folder is not None else 0
    if folder is None or (args.larger is not None and size <= args.larger):
        return None
    found = scheduler.apps.read(app.app_id, brief=True)
    if found is None or not found[1].state.is_terminal:
        return None
    ended = build(app.handle, *found, now=time.time()).ended
    if ended is None or (args.older is not None and ended >= args.older.timestamp()):
        return None
    return {"handle": app.handle, "ended": ended, "bytes": size}


def _bytes_of(folder: str) -> int:
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it was removed meanwhile
                size += os.lstat(os.path.join(root, name)).st_size
    return size
