# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the lines of a job's log to people: a short prefix names the rank, coloured by rank on a terminal.

A host writes torchrun's prefix (``[trainer3]:``), or that of the user's ``--log-line-prefix-template``, before the
lines of a rank that torchrun would prefix. Log files and the hosts' own output keep it. Every command that shows a log
uses this module (``torchx run --log``, ``torchx log``, ``torchx monarch exec``, ``follow`` and ``logs``): it shows
``[3] `` in place of torchrun's prefix, and the prefix of a user's template as it is. Colours go to terminals only.

Standard library only.
"""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass, replace
from string import Template
from typing import TextIO

TEMPLATE = "[${role_name}${rank}]:"
"""The prefix of a rank's lines, as under torchrun, unless the user gives another template."""

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ")

_HOST = "[monarch]"
"""Marks the lines of host processes and supervisors."""

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


def stamp(seconds: float) -> str:
    """Return the time that ``-cfg timestamps`` writes before a line: UTC, with milliseconds, and a blank.

    Args:
        seconds: the time in seconds since the epoch.
    """
    when = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03d}Z "


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        text: the line without its time and prefix, with its line feed if it has one.
        prefix: the prefix to show; empty without one.
        rank: the rank that has written it; None if that is not known.
        time: when it was written, as ``stamp`` writes it but without the blank; empty if the line does not say.
    """

    text: str
    prefix: str = ""
    rank: int | None = None
    time: str = ""

    @property
    def is_of_host(self) -> bool:
        """Whether a host process or a supervisor has written it, unless a rank imitates them."""
        return self.prefix == f"{_HOST} "

    def plain(self) -> str:
        """Return the line for files and pipes."""
        return f"{self.time}{' ' if self.time else ''}{self.prefix}{self.text}"

    def on_terminal(self, coloured: bool) -> str:
        """Return the line for a terminal: with the time of day in the local time zone, and perhaps with colours."""
        time, prefix = self.time and f"{_local(self.time)} ", self.prefix
        if coloured:
            time = time and paint(time, 2)
            if self.rank is not None:
                prefix = paint(prefix, _COLOURS[self.rank % len(_COLOURS)])
            elif prefix:
                prefix = paint(prefix, 2)
        return f"{time}{prefix}{self.text}"


class LineParser:
    """Parse the lines that a host has written.

    Args:
        role_name: torchrun's ``--role``; None for any, where the digits at its end count as digits of the rank.
        template: the user's ``--log-line-prefix-template``; empty for torchrun's default.
    """

    def __init__(self, role_name: str | None = None, template: str = "") -> None:
        self._is_default = template in ("", TEMPLATE)
        self._prefix = re.compile(_pattern(template or TEMPLATE, role_name))

    def parse(self, line: str) -> LogLine:
        """Parse one line, or the beginning of one."""
        found = _STAMP.match(line)
        time, rest = (found[1], line[found.end() :]) if found else ("", line)
        if rest.startswith(f"{_HOST} "):
            return LogLine(rest[len(_HOST) + 1 :], f"{_HOST} ", time=time)
        match = self._prefix.match(rest)
        if match is None or "rank" not in match.groupdict():
            return LogLine(rest, time=time)
        rank = int(match["rank"])
        return LogLine(rest[match.end() :], f"[{rank}] " if self._is_default else match[0], rank, time)

    def parse_of(self, rank: int, line: str) -> LogLine:
        """Parse a line of a known rank; its prefix is empty if the line has none."""
        found = self.parse(line)
        # The name of the role may end in digits: [bert23] is rank 3 of bert2.
        if found.rank is not None and str(found.rank).endswith(str(rank)):
            return replace(found, rank=rank, prefix=f"[{rank}] ")
        return LogLine(line[len(found.time) + 1 :] if found.time else line, "", rank, found.time)


def _pattern(template: str, role_name: str | None) -> str:
    """Return a regular expression that matches the prefixes of a template, with the rank as the group ``rank``."""
    values = {
        "role_name": r"[^\]\s]*?" if role_name is None else re.escape(role_name),
        "rank": r"(?P<rank>\d{1,9})",
        "local_rank": r"\d+",
        "hostname": r"\S*?",
    }
    pattern, position = "", 0
    for each in Template.pattern.finditer(template):
        pattern += re.escape(template[position : each.start()])
        name = each["named"] or each["braced"]
        pattern += "\\$" if each["escaped"] else values.get(name or "", re.escape(each[0]))
        if name == "rank":
            values["rank"] = r"(?P=rank)"
        position = each.end()
    return pattern + re.escape(template[position:])


def _local(time: str) -> str:
    """Return the time of day in the local time zone of a time that ``stamp`` has written."""
    try:
        when = datetime.datetime.strptime(time, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=datetime.timezone.utc)
    except ValueError:  # a rank can write what only looks like a time
        return time
    return f"{when.astimezone():%H:%M:%S}.{when.microsecond // 1000:03d}"
