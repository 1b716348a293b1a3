# SPDX-License-Identifier: BSD-3-Clause
"""What sub-commands print and write: tables, JSON, screens and files."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

STDOUT = ("-", "/dev/stdout")
"""The values of ``-o`` that are no file."""

_HELP = "print JSON instead of text (documentation: JSON of torchx monarch)"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=_HELP)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def print_record(value: object) -> None:
    """Print a value as one line of a stream of JSON, at once."""
    print(json.dumps(value), flush=True)


class Screen:
    """Show lines on a terminal in place of those that it has shown before."""

    def __init__(self) -> None:
        self._height = 0

    def show(self, lines: Sequence[str], whole: bool) -> None:
        """Show lines that the terminal is wide enough for: as many as it has room for, or the ``whole`` at the end."""
        room = shutil.get_terminal_size().lines - 1  # what scrolls would not be erased
        if len(lines) > room and not whole:
            lines = [*lines[: max(0, room - 1)], f"… {len(lines) - room + 1} more lines"]
        print(f"\x1b[{self._height}A\x1b[J" if self._height else "", "\n".join(lines), sep="", flush=True)
        self._height = len(lines)


# -- the option -o -----------------------------------------------------------------------------------------------------


def write_output(path: str, text: str) -> None:
    """Write a text to the file of ``-o``, or to stdout; raise UserError if the file cannot be written."""
    from torchx_monarch.backends.core.errors import UserError  # imports TorchX, which `exec` does not need

    data = text.encode(errors="backslashreplace")  # a surrogate: a byte of a file name that is no UTF-8 (os.fsdecode)
    if path in STDOUT:
        sys.stdout.buffer.write(data)
        return
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
