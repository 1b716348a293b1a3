# SPDX-License-Identifier: BSD-3-Clause
"""Show the lines of a job's log to people: a short prefix names the rank, coloured by rank on a terminal.

A host writes torchrun's prefix (``[trainer3]:``) before the lines of a rank that torchrun would prefix, and commands
show ``[3] `` in its place. What a program may have printed stays byte for byte: a prefix is replaced only where the
host writes it before every line. Lines with a prefix of the user's, ``--log-line-prefix-template``, are shown as they
are.

Standard library only.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, TextIO

from torchx_monarch.system.line_output import CONTINUED, lines_of

TEMPLATE = "[${role_name}${rank}]:"
"""The prefix of a rank's lines, as under torchrun, unless the user gives another template."""

_HOST = "[monarch] "
"""Marks the lines of host processes and supervisors, which a rank can imitate."""

_CONTINUED = CONTINUED.decode()

_COLOURS = (36, 33, 32, 35, 94, 96, 93, 92, 95)
"""ANSI colours of the ranks, in turn: no red, which means an error, and no dark blue, which is unreadable on black."""


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that understands ANSI control sequences; None is a closed stream."""
    return stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


def is_coloured(stream: TextIO | None) -> bool:
    """Return whether to write colours to a stream: to terminals, unless NO_COLOR is set (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def paint(text: str, code: int) -> str:
    """Return a text with the ANSI attribute of this number."""
    return f"\x1b[{code}m{text}\x1b[0m"


class LogLines(NamedTuple):
    """Lines of a log with the same time and prefix, or a part of a line.

    Attributes:
        text: the lines without time and prefix, each with its line feed; a part of a line may have none.
        prefix: the prefix to show before each line; empty without one.
        rank: the rank that has written them; None if that is not known.
        time: when they were written, in seconds since the epoch; 0 if that is not known or not shown.
    """

    text: str
    prefix: str = ""
    rank: int | None = None
    time: float = 0.0

    def plain(self) -> str:
        """Return the lines for files and pipes: with the time in UTC."""
        time = ""
        if self.time:
            when = datetime.datetime.fromtimestamp(self.time, datetime.timezone.utc).replace(tzinfo=None)
            time = f"{when.isoformat(timespec='milliseconds')}Z "
        return self._after(f"{time}{self.prefix}")

    def on_terminal(self, coloured: bool) -> str:
        """Return the lines for a terminal: with the time of day in the local time zone, and perhaps with colours."""
        time, prefix = "", self.prefix
        if self.time:
            time = f"{datetime.datetime.fromtimestamp(self.time).time().isoformat('milliseconds')} "
        if coloured:
            time = time and paint(time, 2)
            prefix = prefix and paint(prefix, 2 if self.rank is None else _COLOURS[self.rank % len(_COLOURS)])
        return self._after(f"{time}{prefix}")

    def _after(self, lead: str) -> str:
        return lead + self.text[:-1].replace("\n", f"\n{lead}") + self.text[-1:] if lead else self.text

    def split(self) -> Iterator[LogLines]:
        """Yield each line alone."""
        return (self._replace(text=line) for line in lines_of(self.text) or [""])


class LineParser:
    """Parse the lines that the hosts of a role have written.

    Args:
        role_name: torchrun's ``--role``; None if lines of ranks do not have its prefix.
        is_complete: whether all lines of all ranks have the prefix. Otherwise a program can have printed what looks so,
            and lines are shown as they are.
    """

    def __init__(self, role_name: str | None = None, *, is_complete: bool = True) -> None:
        self._prefix = re.compile(rf"\[{re.escape(role_name)}(\d{{1,9}})\]:") if role_name is not None else None
        self._is_complete = is_complete

    def parse(self, text: str) -> Iterator[LogLines]:
        """Parse lines, or the beginning of one; yield those that follow each other with the same prefix together."""
        written, rank = first = self._prefix_of(text)
        same = text.count(f"\n{written or '['}") == (text.count("\n", 0, -1) if written else 0)
        for (written, rank), lines in [(first, [text])] if same else groupby(lines_of(text), self._prefix_of):
            found = "".join(lines)
            if not written or (rank is not None and not self._is_complete):
                yield LogLines(found, rank=rank)
            else:
                found = found.removeprefix(written).replace(f"\n{written}", "\n")
                yield LogLines(found, _HOST if rank is None else f"[{rank}] ", rank)

    def _prefix_of(self, line: str) -> tuple[str, int | None]:
        """Return the prefix that a line has in the log, and its rank."""
        if line.startswith(_HOST):
            return _HOST, None
        match = self._prefix.match(line) if self._prefix is not None else None
        return (match[0], int(match[1])) if match is not None else ("", None)


class ShownLines:
    """Parse the lines of one replica or rank for files and pipes, with one line for each progress bar: its last state.

    A program redraws a bar after a carriage return. In a log the lines of other ranks come between its states: what
    follows them is marked with ``CONTINUED``. So a bar is held until its rank writes another line, or the log ends.

    Args:
        parse: parses lines, or the beginning of one.
        live: whether they are for a terminal, on which a bar moves: its states are yielded as they come.
    """

    def __init__(self, parse: Callable[[str], Iterable[LogLines]], live: bool = False) -> None:
        self._parse = parse
        self._live = live
        self._unfinished: LogLines | None = None
        self._bars: dict[int | None, LogLines] = {}

    def feed(self, text: str, time: float = 0.0) -> Iterator[LogLines]:
        """Take lines, or a piece of a bar; yield the lines that it completes, with the times of their last pieces."""
        begun, self._unfinished = self._unfinished, None
        for parsed in self._parse(text) if begun is None else [begun._replace(text=begun.text + text)]:
            lines = parsed._replace(time=time)
            if self._live:
                yield lines
                if not text.endswith("\n"):
                    self._unfinished = LogLines("", rank=lines.rank)
            elif "\r" not in lines.text and lines.text.endswith("\n") and lines.rank not in self._bars:  # nearly always
                yield lines
            else:
                for line in lines.split():
                    yield from self._feed(line)

    def _feed(self, line: LogLines) -> Iterator[LogLines]:
        text = line.text.rstrip("\r\n")
        goes_on, is_bar = text.startswith(_CONTINUED), "\r" in text
        state = text.rpartition("\r")[2] + line.text[len(text) :]  # what a terminal shows
        if not line.text.endswith("\n"):
            mark = _CONTINUED if goes_on else ""
            self._unfinished = line._replace(text=f"{mark}\r{state}") if is_bar else line
            return
        bar = self._bars.pop(line.rank, None)
        is_same_bar = bar is not None and goes_on
        if bar is not None and not (is_same_bar and is_bar):
            yield bar
        if is_bar and state.strip():
            self._bars[line.rank] = line._replace(text=state)
        elif not is_bar and not (is_same_bar and line.text == f"{_CONTINUED}\n"):
            yield line

    def rest(self) -> Iterator[LogLines]:
        """Yield the bars, and the line without a line feed, that are held when the log has ended."""
        last = self._unfinished if not self._live else None
        if last is not None and "\r" in last.text:
            yield from self.feed("\n", last.time) if last.text.strip() else ()  # a bar can have removed itself
            last = None
        yield from self._bars.values()
        if last is not None:
            yield last
        self._unfinished, self._bars = None, {}
