# SPDX-License-Identifier: BSD-3-Clause
"""Show log lines in ``torchx log`` and ``torchx run --log`` with the short prefix of ``insight.log_lines``.

TorchX writes ``ROLE/REPLICA`` before every piece of text that ``log_iter`` yields (``torchx.cli.cmd_log``), and again
after each carriage return. In files and pipes progress bars are shown as their last states.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TextIO

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.command.command import Streams
from torchx_monarch.command.rank_command import rank_command
from torchx_monarch.insight.log_lines import LineParser, ShownLines, is_coloured, is_terminal

_TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def show_lines(
    app: AppSnapshot, role: str, texts: Iterable[str], pattern: re.Pattern[str], stream: TextIO
) -> Iterator[str]:
    """Yield the lines of a role's log that a regular expression matches without their colours, for a stream.

    Lines that all match are yielded together if TorchX, which writes its prefix before each, prints them alike.
    """
    live, coloured = is_terminal(stream), is_coloured(stream)
    shown = ShownLines(parser_of(app, role).parse, live)
    for lines in chain((found for text in texts for found in shown.feed(text)), shown.rest()):
        for part in lines.split() if pattern.pattern or "\r" in lines.text else [lines]:
            if pattern.search(part.plain()):
                yield part.on_terminal(coloured) if live else part.plain()


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
