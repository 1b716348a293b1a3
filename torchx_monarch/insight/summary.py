# SPDX-License-Identifier: BSD-3-Clause
"""Show in a few lines how a job or a run has ended: the last thing on the screen of a command that waits for it.

Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from torchx_monarch.insight.log_lines import is_coloured, is_terminal, paint
from torchx_monarch.system.error_files import path_in_library
from torchx_monarch.system.untrusted_text import one_line

_CAUSE_LINES = 3
"""The most lines of a terminal that the cause takes: a message may have thousands of characters."""

_CAUSE_CHARACTERS = 500
"""The most characters of the cause where there is no terminal."""

_COLOURS = {"SUCCEEDED": 32, "FAILED": 31}
_OTHER_COLOUR = 33

_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line (\d+)(?:, in (.+))?$', re.MULTILINE)


@dataclass(frozen=True)
class Summary:
    """How a job or a run has ended. A fact that is not known is empty, and its line is left out.

    Attributes:
        subject: what has ended: a handle, or a run and a handle.
        cause: why it has ended, with the rank; after a success what else there is to say.
        traceback: the Python traceback of the root cause, of which ``raised_at`` is shown.
        log: path of the log of the root cause, or of the folder of all logs.
        ran: how many hosts and ranks ran, and how often they were restarted.
        hint: what would make it faster.
        next: commands to type next.
    """

    state: str
    subject: str
    seconds: float | None = None
    cause: str = ""
    traceback: str = ""
    log: str = ""
    ran: str = ""
    hint: str = ""
    next: Sequence[str] = ()

    def lines(self, width: int = 0, coloured: bool = False) -> list[str]:
        """Return the lines, at most 12 of a terminal with 80 columns unless a path or a handle is very long.

        A ``width`` of 0 stands for no terminal, where no line is broken.
        """
        state = paint(self.state, _COLOURS.get(self.state, _OTHER_COLOUR)) if coloured else self.state
        took = "" if self.seconds is None else f" after {show_duration(self.seconds)}"
        cause = "note" if self.state == "SUCCEEDED" else "cause"
        facts = [(cause, line) for line in _wrapped(one_line(self.cause), width)]
        facts += [("raised", raised_at(self.traceback)), ("log", one_line(self.log)), ("ran", one_line(self.ran))]
        facts += [("hint", line) for line in _wrapped(self.hint, width)]
        facts += [("next", one_line(command)) for command in self.next]
        shown, last = [f"{state}{took}: {one_line(self.subject)}"], ""
        for name, text in facts:
            if text:
                shown.append(f"  {'' if name == last else f'{name}:':<8}{text}")
                last = name
        return shown

    def write(self, stream: TextIO | None) -> None:
        """Write the lines to a stream; do nothing if it is closed."""
        if stream is None or stream.closed:
            return
        width = shutil.get_terminal_size().columns if is_terminal(stream) else 0
        stream.write("".join(f"{line}\n" for line in self.lines(width, is_coloured(stream))))
        stream.flush()


def show_duration(seconds: float) -> str:
    """Return a duration for people: ``4.2 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def show_shape(hosts: int, ranks: int | None) -> str:
    """Return the size of a job: ``2 hosts x 4 ranks``, ``1 host`` if the ranks of a host (None) are not known."""
    shown = "1 host" if hosts == 1 else f"{hosts} hosts"
    return shown if ranks is None else f"{shown} x {ranks} rank{'' if ranks == 1 else 's'}"


def show_restarts(count: int) -> str:
    """Return a number of restarts: ``no restart``, ``1 restart``, ``2 restarts``."""
    return f"{count or 'no'} restart{'s' if count > 1 else ''}"


def local_path(path: str) -> str:
    """Return a path of a job's host if this machine has the file; else an empty text."""
    return path if path and os.path.exists(path) else ""


def _wrapped(text: str, width: int) -> list[str]:
    if not width:
        return [text if len(text) <= _CAUSE_CHARACTERS else f"{text[:_CAUSE_CHARACTERS]}..."]
    return textwrap.wrap(text, max(20, width - 10), max_lines=_CAUSE_LINES, placeholder="...", break_on_hyphens=False)


def raised_at(traceback: str) -> str:
    """Return where an exception was raised: ``train.py, line 7, in step``; empty if the traceback has no frame.

    A library is named behind the line that has called it: ``train.py, line 7, in step, which called pathlib.py, ...``.
    """
    frames = _FRAME.findall(traceback)
    own = [frame for frame in frames if not path_in_library(frame[0])]
    places: list[str] = []
    for path, line, function in dict.fromkeys([*own[-1:], *frames[-1:]]):
        shown = (path_in_library(path) or path) if places else path
        places.append(f"{shown}, line {line}" + (f", in {function}" if function else ""))
    return one_line(", which called ".join(places))
