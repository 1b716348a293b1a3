# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The stdout and stderr of a host process, which its ranks and the host itself write whole lines to."""

from __future__ import annotations

import os
import select
from typing import Protocol

from torchx_monarch.system.line_output import LineOutput


def write_all(fd: int, data: bytes) -> bool:
    """Write everything to ``fd``; False when it cannot be (nobody reads, the disk is full)."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # whoever gave us the descriptor made it so; it is shared, and not ours to change
            select.select([], [fd], [])
        except OSError:
            return False
    return True


class Console:
    """The host's stdout or stderr, which all of its ranks and the host itself write to.

    Args:
        fd: the descriptor.
        same: the other of the two; both know of each other's unfinished lines where they are one file or terminal.
    """

    def __init__(self, fd: int, same: Console | None = None) -> None:
        self._fd = fd
        self._lines = LineOutput()
        if same is not None and os.path.samestat(os.fstat(fd), os.fstat(same._fd)):
            self._lines = same._lines

    def write(self, writer: object, text: bytes, prefix: bytes = b"") -> None:
        """Write whole lines, or a line that goes on (see ``LineOutput.place``)."""
        write_all(self._fd, self._lines.place(writer, text, prefix))

    def end(self, writer: object) -> None:
        """End the unfinished line of a writer that has ended."""
        write_all(self._fd, self._lines.end(writer))


class LineSink(Protocol):
    """What else gets what goes onto the host's output (see ``FilteredFile``)."""

    def write(self, text: bytes, shown: bytes) -> None:
        """Take whole lines, or a line or a piece of one that goes on.

        Args:
            text: as the rank wrote it.
            shown: the same with the prefix before each line that begins in it.
        """

    def close(self) -> None:
        """There are no more."""
