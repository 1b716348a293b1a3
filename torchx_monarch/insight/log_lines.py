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
from collections.abc import Callable, Iterator
from typing import NamedTuple, TextIO

from torchx_monarch.system.line_output import CONTINUED

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


class LogLine(NamedTuple):
    """One line of a log.

    Attributes:
        text: the line without its time and prefix, with its line feed if it has one.
        prefix: the prefix to show; empty without one.
        rank: the rank that has written it; None if that is not known.
        time: when it was written, in seconds since the epoch; 0 if that is not shown.
    """

    text: str
    prefix: str = ""
    rank: int | None = None
    time: float = 0.0

    def plain(self) -> str:
        """Return the line for files and pipes: with the time in UTC."""
        time = ""
        if self.time:
            when = datetime.datetime.fromtimestamp(self.time, datetime.timezone.utc).replace(tzinfo=None)
            time = f"{when.isoformat(timespec='milliseconds')}Z "
        return f"{time}{self.prefix}{self.text}"

    def on_terminal(self, coloured: bool) -> str:
        """Return the line for a terminal: with the time of day in the local time zone, and perhaps with colours."""
        time, prefix = "", self.prefix
        if self.time:
            time = f"{datetime.datetime.fromtimestamp(self.time).time().isoformat('milliseconds')} "
        if coloured:
            time = time and paint(time, 2)
            if self.rank is not None:
                prefix = paint(prefix, _COLOURS[self.rank % len(_COLOURS)])
            elif prefix:
                prefix = paint(prefix, 2)
        return f"{time}{prefix}{self.text}"


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

    def parse(self, line: str) -> LogLine:
        """Parse one line, or the beginning of one."""
        if line.startswith(_HOST):
            return LogLine(line.removeprefix(_HOST), _HOST)
        match = self._prefix.match(line) if self._prefix is not None else None
        if match is None:
            return LogLine(line)
        rank = int(match[1])
        return LogLine(line[match.end() :], f"[{rank}] ", rank) if self._is_complete else LogLine(line, rank=rank)


class LastStates:
    """Parse the lines of one replica or rank for files and pipes, with one line for each progress bar: its last state.

    A program redraws a bar after a carriage return. In a log the lines of other ranks come between its states: what
    follows them is marked with ``CONTINUED``. So a bar is held until its rank writes another line, or the log ends.

    Args:
        parse: parses one line, or the beginning of one.
    """

    def __init__(self, parse: Callable[[str], LogLine]) -> None:
        self._parse = parse
        self._unfinished: tuple[float, LogLine] | None = None
        self._bars: dict[int | None, tuple[float, LogLine]] = {}

    def feed(self, piece: str, time: float = 0.0) -> Iterator[tuple[float, LogLine]]:
        """Take a line, or a piece of a bar; yield the lines that it completes, with the times of their last pieces."""
        if self._unfinished is None and not self._bars and "\r" not in piece and piece.endswith("\n"):  # nearly always
            yield time, self._parse(piece)
            return
        if self._unfinished is not None:
            begun = self._unfinished[1]
            line = begun._replace(text=begun.text + piece)
        else:
            line = self._parse(piece)
        self._unfinished = None
        goes_on, is_bar = line.text.startswith(_CONTINUED), "\r" in line.text.rstrip("\r\n")
        state = last_state(line.text)
        if not piece.endswith("\n"):
            mark = _CONTINUED if goes_on else ""
            self._unfinished = time, line._replace(text=f"{mark}\r{state}") if is_bar else line
            return
        bar = self._bars.pop(line.rank, None)
        is_same_bar = bar is not None and goes_on
        if bar is not None and not (is_same_bar and is_bar):
            yield bar
        if is_bar and state.strip():
            self._bars[line.rank] = time, line._replace(text=state)
        elif not is_bar and not (is_same_bar and line.text == f"{_CONTINUED}\n"):
            yield time, line

    def rest(self) -> Iterator[tuple[float, LogLine]]:
        """Yield the bars, and the line without a line feed, that are held when the log has ended."""
        last = self._unfinished
        if last is not None and "\r" in last[1].text:
            yield from self.feed("\n", last[0]) if last[1].text.strip() else ()  # a bar can have removed itself
            last = None
        yield from self._bars.values()
        if last is not None:
            yield last
        self._unfinished, self._bars = None, {}


def last_state(line: str) -> str:
    """Return what a line, with or without its end, shows on a terminal: the text after the last carriage return."""
    text = line.rstrip("\r\n")
    return text.rpartition("\r")[2] + line[len(text) :]
