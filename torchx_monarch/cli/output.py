# SPDX-License-Identifier: BSD-3-Clause
"""What sub-commands print and write: tables and JSON, on standard streams that may be closed, and files."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.exit_codes import CommandError

STDOUT = ("-", "/dev/stdout")
"""The values of ``-o`` that are no file."""

_HELP = "print JSON instead of text (documentation: JSON of torchx monarch)"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print rows in columns of equal width."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def add_json(parser: argparse.ArgumentParser) -> None:
    """Define ``--json``."""
    parser.add_argument("--json", action="store_true", help=_HELP)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
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


def open_stderr() -> None:
    """Open stderr on ``/dev/null`` if the caller has closed it (``2>&-``): ``print`` would take stdout for None.

    A closed stdout ends TorchX as it starts.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends


@contextlib.contextmanager
def written_output() -> Iterator[None]:
    """Write all that the block prints to stdout. After a failure stdout is ``/dev/null``, for Python's own end.

    Raises:
        BrokenPipeError: nobody reads it.
        CommandError: it cannot be written, as on a full disk.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard()
        raise
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _discard()
        raise CommandError(f"cannot write the output: {error.strerror}", exit_codes.OUTPUT) from None


def _discard() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- the option -o -----------------------------------------------------------------------------------------------------


def write_output(path: str, text: str) -> None:
    """Write a text aside, and give it the name of ``-o`` and the permissions of the file that has this name.

    Raises:
        UserError: the file cannot be written, or something else has the name.
    """
    from torchx_monarch.backends.core.errors import UserError  # imports TorchX, which `exec` does not need

    data = text.encode(errors="backslashreplace")  # a surrogate: a byte of a file name that is no UTF-8 (os.fsdecode)
    if path in STDOUT:
        sys.stdout.buffer.write(data)
        return
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"cannot write {path}: it is no regular file")
    path = os.path.realpath(path)
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(aside, "xb") as file:
            if os.path.exists(path):
                shutil.copymode(path, aside)  # before there is anything to read
            file.write(data)
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
