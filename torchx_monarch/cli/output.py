# SPDX-License-Identifier: BSD-3-Clause
"""What sub-commands print: tables and JSON, on standard streams that may be closed."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator

_HELP = "print JSON instead of text, see docs/reference/json.md"

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


class OutputError(Exception):
    """Raised when stdout cannot be written, as on a full disk; the message gives the reason."""


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
        OutputError: it cannot be written.
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
        raise OutputError(error.strerror) from None


def _discard() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
