# SPDX-License-Identifier: BSD-3-Clause
"""Show log lines in ``torchx log`` and ``torchx run --log`` with the short prefix of ``insight.log_lines``.

TorchX writes ``ROLE/REPLICA`` before every piece of text that ``log_iter`` yields (``torchx.cli.cmd_log``), and again
after each carriage return. In files and pipes progress bars are shown as their last states.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TextIO

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.command.command import Streams
from torchx_monarch.command.rank_command import rank_command
from torchx_monarch.insight.log_lines import LastStates, LineParser, LogLine, is_coloured, is_terminal
from torchx_monarch.schedulers import command

_TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


class LogDisplay:
    """Decide how the log lines of one role look on a stream (None if it is closed)."""

    def __init__(self, app: AppSnapshot, role: str, stream: TextIO | None) -> None:
        self._parser = parser_of(app, role)
        self._is_terminal = is_terminal(stream)
        self._is_coloured = is_coloured(stream)

    @classmethod
    def for_command(cls, app: AppSnapshot, role: str) -> LogDisplay | None:
        """Return how this process's ``torchx log`` or ``torchx run --log`` shows lines; None in any other program."""
        stream = command.running.log_stream if command.running is not None else None
        return cls(app, role, stream) if stream is not None else None

    def show(self, pieces: Iterable[str], pattern: re.Pattern[str]) -> Iterator[str]:
        """Yield the lines to show: those that a regular expression matches without their colours."""
        if not self._is_terminal:
            states = LastStates(self._parser.parse)
            found = itertools.chain((line for piece in pieces for line in states.feed(piece)), states.rest())
            texts = (line.plain() for _, line in found)
            yield from filter(pattern.search, texts)
            return
        goes_on = False
        for piece in pieces:
            line = LogLine(piece) if goes_on else self._parser.parse(piece)
            if pattern.search(line.plain()):
                yield line.on_terminal(self._is_coloured)
            goes_on = not piece.endswith("\n")


def parser_of(app: AppSnapshot, role_name: str) -> LineParser:
    """Return the parser of the lines of a role. Each run on a live allocation has its own prefix: none is known."""
    written = app.app.roles if app.app is not None else ()
    role = next((app_role for app_role in written if app_role.name == role_name), None)
    command = rank_command(role) if role is not None else None
    if role is None or command is None or command.kind != "torchrun" or command.options.tee == Streams():
        return LineParser()
    options = command.options
    if options.log_line_prefix_template or _TEMPLATE_VARIABLE in role.env:
        return LineParser()
    return LineParser(options.role, is_complete=options.tee == Streams(every=3))
