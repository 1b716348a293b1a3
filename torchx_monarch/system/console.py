# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The stdout and stderr of a host process, to which the host writes its own lines and those of its ranks."""

from __future__ import annotations

import os
import select
from typing import Protocol

from torchx_monarch.system.line_output import LineOutput


def write_all(fd: int, data: bytes) -> bool:
    """Write all bytes to a descriptor.

    Returns:
        False if they could not be written: the reader has closed the pipe, or the disk is full.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # O_NONBLOCK is inherited and shared with other processes: clearing it affects them
            select.select([], [fd], [])
        except OSError:
            return False
    return True


class Console:
    """The host's stdout or stderr, shared by the host and all of its ranks.

    Args:
        fd: the descriptor.
        same: the other of the two consoles; None for the first. If both are the same file or terminal, they share the
            state of unfinished lines.
    """

    def __init__(self, fd: int, same: Console | None = None) -> None:
        self._fd = fd
        self._lines = LineOutput()
        if same is not None and os.path.samestat(os.fstat(fd), os.fstat(same._fd)):
            self._lines = same._lines

    def write(self, writer: object, text: bytes, prefix: bytes = b"") -> None:
        """Write whole lines, or part of a line that continues later (see ``LineOutput.place``)."""
        write_all(self._fd, self._lines.place(writer, text, prefix))

    def end(self, writer: object) -> None:
        """End the unfinished line of a writer that has ended."""
        write_all(self._fd, self._lines.end(writer))


class LineSink(Protocol):
    """A further consumer of the text that is written to the host's output (see ``FilteredFile``)."""

    def write(self, text: bytes, shown: bytes) -> None:
        """Take whole lines, or part of a line that continues later.

        Args:
            text: the bytes that the rank wrote.
            shown: the same bytes, with the prefix before each line that starts in them.
        """

    def close(self) -> None:
        """Close the sink; no text follows."""
