# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch top``: a job and its ranks on one screen, again and again."""

from __future__ import annotations

import argparse
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterator

from torchx_monarch.cli import handles
from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.output import add_json, print_record
from torchx_monarch.cli.scheduler_access import app_id_of, opened
from torchx_monarch.cli.terminal_screen import TerminalScreen
from torchx_monarch.cli.top_view import View, screen, show
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.rank_samples import ask_samples
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.insight import rank_table
from torchx_monarch.insight.log_lines import is_terminal
from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.schedulers import job_status
from torchx_monarch.schedulers.monarch import MonarchScheduler

_INTERVAL = 2.0
"""Seconds between two looks at the ranks, unless the user chooses others."""

_LEAST_INTERVAL, _MOST_INTERVAL = 0.5, 86400.0

_ONCE = 1.0
"""Seconds between the two looks of ``--once``, of which rates follow."""

_NO_TERMINAL_WIDTH = 160
"""Columns of the lines where there is no terminal."""

_KEYS_EVERY = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch top``."""
    add_handle(parser, optional=True)
    parser.add_argument(
        "--interval", type=_interval, default=_INTERVAL, metavar="SECONDS", help="time between two looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print it once, without a screen")
    parser.add_argument("--by-host", action="store_true", help="a line for each host instead of each rank")
    add_json(parser)


def _interval(text: str) -> float:
    try:
        return min(max(_LEAST_INTERVAL, float(text)), _MOST_INTERVAL)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None


def run(args: argparse.Namespace) -> None:
    """Show the job until it has ended, or until q or Ctrl-C."""
    args.handle = args.handle or handles.resolve(handles.LAST)
    interval = args.interval
    if args.once:
        found = views(args, min(_ONCE, interval))
        first = next(found)
        _print(first if first.status.has_ended else next(found), args)
    elif args.json or not (is_terminal(sys.stdout) and is_terminal(sys.stdin)):
        for view in views(args, interval):
            _print(view, args)
    else:
        last = _show(args, interval)
        print("\n".join(show(last, _width())) if last.status.has_ended else last.status.handle)


def views(args: argparse.Namespace, interval: float) -> Iterator[View]:
    """Yield the job and its ranks again and again, until the job has ended.

    Args:
        interval: seconds between two looks, unless the scheduler is to be asked less often.

    Raises:
        HandleError: there is no such app.
        BackendError: its scheduler cannot be reached.
    """
    scheduler_name, app_id = app_id_of(args.handle)
    hosts = hosts_of(args)
    before: list[RankSample] = []
    with opened(scheduler_name) as scheduler:
        while True:
            view, samples = _look(scheduler, hosts, app_id, before)
            yield view
            if view.status.has_ended:
                return
            before = samples or before
            time.sleep(max(interval, scheduler.inner.poll))


def _look(
    scheduler: MonarchScheduler, hosts: Hosts, app_id: str, before: list[RankSample]
) -> tuple[View, list[RankSample]]:
    found = scheduler.apps.read(app_id)
    if found is None:
        raise handles.unknown(hosts.handle)
    status = job_status.build(hosts.handle, *found, scheduler.read_events(app_id))
    samples: list[RankSample] = []
    missing: dict[str, str] = {}
    problem = ""
    if not status.has_ended:
        try:
            samples, missing = ask_samples(hosts)
        except (UnreachableError, RefusedError, AllocationError) as error:
            problem = str(error)
    return View(status, rank_table.rows(samples, before), missing, problem), samples


def _print(view: View, args: argparse.Namespace) -> None:
    if args.json:
        print_record(view.to_json())
    else:
        print("\n".join(show(view, _width(), args.by_host)), end="\n\n", flush=True)


def _width() -> int:
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else _NO_TERMINAL_WIDTH


def _show(args: argparse.Namespace, interval: float) -> View:
    """Show the job on the whole screen, and return what was shown last."""
    looks: queue.SimpleQueue[View | BaseException] = queue.SimpleQueue()

    def read_views() -> None:
        try:
            for view in views(args, interval):
                looks.put(view)
        except BaseException as error:
            looks.put(error)

    # A daemon: q ends the command also while a host does not answer.
    threading.Thread(target=read_views, daemon=True).start()
    view = _next(looks, None)
    first, by_host, drawn = 0, args.by_host, None
    with TerminalScreen() as terminal:
        while not view.status.has_ended:
            width, height = terminal.size
            lines, first = screen(view, width, height, first, by_host)
            if lines != drawn:
                terminal.draw(lines)
                drawn = lines
            page = max(1, height - 8)
            for key in terminal.keys(_KEYS_EVERY):
                if key in ("q", "Q"):
                    return view
                by_host = by_host != (key == "h")
                first += {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -page, "pgdn": page, " ": page}.get(key, 0)
                first = {"home": 0, "g": 0, "end": len(view.ranks), "G": len(view.ranks)}.get(key, max(0, first))
            view = _next(looks, view)
    return view


def _next(looks: queue.SimpleQueue[View | BaseException], present: View | None) -> View:
    """Return the next view, or the present one if there is none yet; wait for the first."""
    try:
        found = looks.get(block=present is None)
    except queue.Empty:
        assert present is not None
        return present
    if isinstance(found, BaseException):
        raise found
    return found
