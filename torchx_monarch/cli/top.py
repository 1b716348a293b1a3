# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch top``: a job and its ranks on one screen, again and again."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli.allocation_arguments import add_handle
from torchx_monarch.cli.handles import check_local
from torchx_monarch.cli.jobs import SAMPLE_PAUSE_S, JobFacts, JobReader, opened_job
from torchx_monarch.cli.output import add_json, print_record
from torchx_monarch.cli.status import headline
from torchx_monarch.insight.log_lines import is_terminal
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.insight.stacks import rank_ranges
from torchx_monarch.insight.summary import show_restarts
from torchx_monarch.schedulers import job_status
from torchx_monarch.system.termination import termination
from torchx_monarch.system.untrusted_text import one_line

if TYPE_CHECKING:
    import curses

_INTERVAL_S = 2.0
"""Time between two questions to the hosts, unless the user chooses another."""

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.5, 86400.0

_NO_TERMINAL_WIDTH = 160
"""Columns of the lines where there is no terminal."""

_KEY_TIMEOUT_MS = 200

_MAX_ROWS = 1 << 20
"""More rows than a table has: ``screen`` shows its end instead."""

_JSON = {
    **{name: name for name in ("host", "pid", "state", "cpu", "rss_bytes", "gpu_bytes", "gpu_busy")},
    "rate": "collectives_per_second",
    "late": "waited_for",
    "line": "last_line",
}
"""The fields of a rank in JSON, and those of ``RankView``."""

_KEYS = "q quit   up/down/pgup/pgdn scroll   h {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument(
        "--interval", type=_interval, default=_INTERVAL_S, metavar="SECONDS", help="time between two looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print it once, without a screen")
    parser.add_argument("--by-host", action="store_true", help="a line for each host instead of each rank")
    add_json(parser)


def _interval(text: str) -> float:
    try:
        return min(max(_MIN_INTERVAL_S, float(text)), _MAX_INTERVAL_S)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None


def to_json(facts: JobFacts) -> dict[str, object]:
    """Return a job and its ranks as JSON values."""
    ranks = [
        {"ranks": [rank.rank], **{name: getattr(rank, field) for name, field in _JSON.items()}}
        for rank in facts.status.activity or ()
    ]
    status = {**facts.status.to_json(), "activity": None}
    return {"status": status, "ranks": ranks, "missing": dict(facts.missing), "problem": facts.problem}


def run(args: argparse.Namespace) -> None:
    """Show the job until it has ended, or until q or Ctrl-C."""
    if not args.address:
        check_local(args.handle)
    with opened_job(args.handle, args.role, args.address) as job:
        if args.once:
            _print(job.read(min(SAMPLE_PAUSE_S, args.interval)), args)
        elif args.json or not (is_terminal(sys.stdout) and is_terminal(sys.stdin)):
            for facts in job.watch(args.interval, 0.0):
                _print(facts, args)
        else:
            last = _show(job, args)
            print("\n".join(lines(last, _width())) if last.status.has_ended else last.status.handle)


def _print(facts: JobFacts, args: argparse.Namespace) -> None:
    if args.json:
        print_record(to_json(facts))
    else:
        print("\n".join(lines(facts, _width(), args.by_host)), end="\n\n", flush=True)


def _width() -> int:
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else _NO_TERMINAL_WIDTH


# -- as lines ----------------------------------------------------------------------------------------------------------


def head(facts: JobFacts, width: int) -> list[str]:
    """Return the lines above the table: the job, what it does, and what is wrong."""
    status = facts.status
    parts = [job_status.in_one_line(status), show_restarts(status.restarts) if status.restarts else ""]
    found = [headline(status), *textwrap.wrap(one_line("; ".join(filter(None, parts))), width, break_on_hyphens=False)]
    found += [one_line(f"host {replica}: {why}") for replica, why in facts.missing.items()]
    found += [one_line(facts.problem)] if facts.problem else []
    return [line[:width] for line in found]


def lines(facts: JobFacts, width: int, by_host: bool = False) -> list[str]:
    """Return all lines, none longer than ``width`` characters."""
    return head(facts, width) + (rank_table(ranks, width, by_host) if (ranks := facts.status.activity) else [])


def screen(facts: JobFacts, width: int, height: int, first: int, by_host: bool = False) -> tuple[list[str], int]:
    """Return the lines of a terminal, and the first row that is shown: ``first``, unless that is too large."""
    above = head(facts, width)[: max(1, height - 4)]
    ranks = facts.status.activity
    table = rank_table(ranks, width, by_host) if ranks else [""]
    room = max(1, height - len(above) - 3)
    count = len(table) - 1
    first = max(0, min(first, count - room))
    shown = table[1 + first : 1 + first + room]
    keys = _KEYS.format("by rank" if by_host else "by host")
    if count > room:
        keys = f"{keys}   {first + 1}-{first + len(shown)} of {count}"
    body = [*above, "", table[0], *shown]
    return [*body, *[""] * (height - 1 - len(body)), keys[:width]], first


# -- the table of ranks ------------------------------------------------------------------------------------------------

_HOST_WIDTH = 12
"""The most characters of a host's name that are shown; the end of longer names, which tells hosts apart."""

_RANKS_WIDTH = 11
"""The most characters of the numbers of a host's ranks."""

_GAP = "  "

_HEAD = ("RANK", "HOST", "PID", "STATE", "CPU", "RSS", "GPU", "COLL/S", "LATE")
_LEFT_ALIGNED = ("HOST", "STATE")


def rank_table(ranks: Sequence[RankView], width: int, by_host: bool = False) -> list[str]:
    """Return the head of the table and a line for each row, none longer than ``width`` characters.

    The column of GPUs is left out where no rank has one, and the last line of a rank takes what is left.

    Args:
        by_host: whether the ranks of a host share a row: with the sums of CPU and memory, the slowest rate, and the
            time of the rank that others wait for longest.
    """
    groups: dict[object, list[RankView]] = {}
    for rank in ranks:
        groups.setdefault(rank.host if by_host else (rank.rank, rank.pid), []).append(rank)
    columns = [at for at, name in enumerate(_HEAD) if name != "GPU" or any(rank.devices for rank in ranks)]
    rows = [_HEAD, *map(_cells, groups.values())]
    texts = [
        "LAST LINE",
        *(next((rank.last_line for rank in group if rank.last_line), "") for group in groups.values()),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]

    def line(row: Sequence[str], text: str) -> str:
        cells = [
            row[at].ljust(widths[at]) if _HEAD[at] in _LEFT_ALIGNED else row[at].rjust(widths[at]) for at in columns
        ]
        return _GAP.join([*cells, one_line(text)])[:width].rstrip()

    return [line(row, text) for row, text in zip(rows, texts, strict=True)]


def _cells(ranks: Sequence[RankView]) -> tuple[str, ...]:
    numbers = rank_ranges([rank.rank for rank in ranks]).partition(" ")[2]
    states = Counter({"uninterruptible": "disk wait"}.get(rank.state, rank.state) for rank in ranks)
    cpus, rates, waits = (_values(ranks, name) for name in ("cpu", "collectives_per_second", "waited_for"))
    memory, busy = _values(ranks, "gpu_bytes"), _values(ranks, "gpu_busy")
    return (
        numbers if len(numbers) <= _RANKS_WIDTH else f"{numbers[: _RANKS_WIDTH - 1]}…",
        one_line(ranks[0].host)[-_HOST_WIDTH:],
        str(ranks[0].pid) if len(ranks) == 1 else "",
        next(iter(states)) if len(states) == 1 else ", ".join(f"{count} {state}" for state, count in states.items()),
        f"{sum(cpus):.0%}" if cpus else "",
        show_bytes(sum(rank.rss_bytes for rank in ranks)),
        f"{sum(busy) / len(busy):.0%} {show_bytes(sum(memory))}" if memory else "",
        f"{min(rates):.{1 if min(rates) < 99.95 else 0}f}" if rates else "",
        show_seconds(max(waits)) if waits else "",
    )


def _values(ranks: Sequence[RankView], name: str) -> list[Any]:
    return [value for rank in ranks if (value := getattr(rank, name)) is not None]


def show_bytes(count: int) -> str:
    """Return a size in at most five characters: ``512K``, ``1.5G``."""
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < 999.5:
            return f"{value:.0f}{unit}" if value >= 9.95 or unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"


def show_seconds(seconds: float) -> str:
    """Return a duration in at most five characters: ``0.25s``, ``12s``, ``14m``, ``3h``."""
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 99.5:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 99.5 * 60 else f"{seconds / 3600:.0f}h"


# -- on the whole screen -----------------------------------------------------------------------------------------------


def _show(job: JobReader, args: argparse.Namespace) -> JobFacts:
    """Show the job on the whole screen, and return what was shown last."""
    arrived: queue.SimpleQueue[JobFacts | BaseException] = queue.SimpleQueue()

    def read() -> None:
        try:
            for facts in job.watch(args.interval, 0.0):
                arrived.put(facts)
        except BaseException as error:
            arrived.put(error)

    # A daemon: q ends the command also while a host does not answer.
    threading.Thread(target=read, daemon=True).start()
    facts = _next(arrived, None)
    first, by_host = 0, args.by_host
    with whole_screen() as terminal:
        while not facts.status.has_ended:
            height, width = terminal.getmaxyx()
            shown, first = screen(facts, width, height, first, by_host)
            draw(terminal, shown)
            key = pressed(terminal)
            if key in ("q", "Q"):
                return facts
            by_host = by_host != (key == "h")
            page = max(1, height - 8)
            moves = {"KEY_UP": -1, "k": -1, "KEY_DOWN": 1, "j": 1, "KEY_PPAGE": -page, "KEY_NPAGE": page, " ": page}
            moves |= {"KEY_HOME": -first, "g": -first, "KEY_END": _MAX_ROWS, "G": _MAX_ROWS}
            first += moves.get(key, 0)
            facts = _next(arrived, facts)
    return facts


def _next(arrived: queue.SimpleQueue[JobFacts | BaseException], present: JobFacts | None) -> JobFacts:
    """Return what was read next, or the present facts if nothing was yet; wait for the first."""
    try:
        found = arrived.get(block=present is None)
    except queue.Empty:
        assert present is not None
        return present
    if isinstance(found, BaseException):
        raise found
    return found


@contextlib.contextmanager
def whole_screen() -> Iterator[curses.window]:
    """Use the whole terminal until the block ends. Ctrl-Z gives it back until the process is continued."""
    import curses

    # Before curses, which keeps handlers that are there: its own for SIGTERM exits with 1, and has none for SIGHUP.
    termination.install()
    try:
        curses.setupterm()
    except curses.error:  # this machine does not know the kind of the terminal; nearly all do what xterm does
        os.environ["TERM"] = "xterm"
    try:
        terminal = curses.initscr()
    except curses.error as error:  # a machine without descriptions of terminals
        raise UserError(f"the screen cannot be used ({error}); try --once") from None
    try:
        curses.noecho()
        curses.cbreak()
        terminal.keypad(True)
        terminal.timeout(_KEY_TIMEOUT_MS)
        with contextlib.suppress(curses.error):  # a terminal that cannot hide its cursor
            curses.curs_set(0)
        yield terminal
    finally:
        curses.endwin()
        termination.remove()


def draw(terminal: curses.window, shown: Sequence[str]) -> None:
    """Show lines from the top on, in place of what is there."""
    import curses

    terminal.erase()
    for row, line in enumerate(shown):
        with contextlib.suppress(curses.error):  # the last cell of the screen: the cursor has no place behind it
            terminal.addstr(row, 0, line)
    terminal.refresh()


def pressed(terminal: curses.window) -> str:
    """Return the key that is pressed: a character, or a name as ``KEY_UP``; empty if there is none for a while.

    A terminal that has been closed presses q: it is never waited for.
    """
    import curses

    key = terminal.getch()
    if key < 0:
        return "" if is_terminal(sys.stdin) else "q"
    return curses.keyname(key).decode(errors="replace")
