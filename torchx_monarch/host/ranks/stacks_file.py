# SPDX-License-Identifier: BSD-3-Clause
"""The file through which a rank, and the children that it forks, give their stacks to the host."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile

SIZE = 1 << 18
"""Bytes that can be written for one process: a hundred threads of a hundred frames have a few times less."""


class StacksFile:
    """A file without a name that the host shares with one rank: its content and its position.

    The host sets the position to the start before each request. So the file does not grow. It lies in memory, sealed
    against growth, where Python has ``memfd_create``; otherwise in the folder for temporary files.

    Attributes:
        lock: held by a request, from the first signal to the last read.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._is_open = True
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, SIZE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        else:
            with tempfile.TemporaryFile(buffering=0) as file:
                self.descriptor = os.dup(file.fileno())

    @property
    def is_open(self) -> bool:
        """Whether the host has it open; afterwards there are no more stacks of the rank."""
        return self._is_open

    @property
    def written(self) -> int:
        """Number of bytes that have been written since ``rewind``."""
        return os.lseek(self.descriptor, 0, os.SEEK_CUR)

    def rewind(self) -> None:
        """Have the next process write at the start."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)

    def read(self) -> str:
        """Return what has been written since ``rewind``."""
        return os.pread(self.descriptor, min(self.written, SIZE), 0).decode(errors="replace")

    def close(self) -> None:
        """Close the host's end; a process that still has the file keeps it."""
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)
