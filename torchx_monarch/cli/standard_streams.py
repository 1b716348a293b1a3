# SPDX-License-Identifier: BSD-3-Clause
"""Stdout on a full disk or a pipe that nobody reads, and a stderr that is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
