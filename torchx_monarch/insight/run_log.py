# SPDX-License-Identifier: BSD-3-Clause
"""The log of one run on a live allocation: JSON lines in a file, with one writer and any number of followers.

The file is the buffer. A follower that reads slowly or starts late costs no memory and delays neither the run nor other
followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from torchx_monarch.system import safe_files
from torchx_monarch.system.console import WriterThread, write_all

_PIECE = 4000
"""Most characters of output in one record, so that the records of one ``_CHUNK`` are far less than a message may be."""

_CHUNK = 1 << 18


class RunLog:
    """The records of one run, in a file of mode 0600 that it creates.

    Raises:
        OSError: the file cannot be created, or is not a regular file of this user. A rank of an earlier run can have
            put something else in its place.
    """

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self.path = path
        self.writer = WriterThread()
        self._file = safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.ftruncate(self._file, 0)
        self._closed = False
        self._requested = self._appended = 0  # records
        self._loop = asyncio.get_running_loop()
        self._is_awaited = False
        self._changed = asyncio.Event()

    def append(self, record: dict[str, Any]) -> None:
        """Append a record; do nothing after ``close``."""
        self.append_line(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def append_line(self, line: bytes) -> None:
        """Append a record that is encoded already and ends with a line feed; do nothing after ``close``."""
        if self._closed:
            return

        def append() -> None:
            try:
                write_all(self._file, line)  # a full disk loses output, but does not end the run
            finally:
                self._appended += 1
                if self._is_awaited:
                    self._is_awaited = False
                    with contextlib.suppress(RuntimeError):  # the event loop has ended
                        self._loop.call_soon_threadsafe(self._wake)

        self._requested += 1
        self.writer.call(append, size=len(line))

    def close(self) -> None:
        """Mark the log as complete; later records are dropped."""
        if not self._closed:
            self._closed = True
            self.writer.close(self._file)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, wait: bool = True) -> AsyncIterator[list[bytes]]:
        """Yield the records from the first on, as lists of lines, until the log is closed.

        Without ``wait`` the iteration ends with the last record that was appended before it began.

        Raises:
            OSError: another file is in the place of the log.
        """
        requested, rest = self._requested, b""
        with open(safe_files.open_file(self.path), "rb", buffering=0) as file:
            while True:
                # All before the read, so that what is written after it wakes this follower.
                ends, appended, changed = self._closed or not wait, self._appended, self._changed
                last = self._requested if self._closed else requested
                self._is_awaited = True
                data = await asyncio.to_thread(file.read, _CHUNK)
                if not data:
                    if ends and appended >= last:
                        return
                    await changed.wait()
                    continue
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    yield [line + b"\n" for line in lines]


class RunLogSink:
    """Copy a rank's output from the host's output to the log of its run.

    Args:
        prefix: torchrun's own prefix before each line, which clients show in a shorter form; empty if there is none, or
            one of the user's.
    """

    def __init__(self, run_log: RunLog, rank: int, stream: str, prefix: str) -> None:
        self.writers = [run_log.writer]
        self._run_log = run_log
        self._record = {"type": "output", "rank": rank, "stream": stream, "prefix": prefix}

    def write(self, text: bytes, shown: bytes) -> None:
        """Append ``shown``, the text with its prefixes, in records of ``_PIECE`` characters at most."""
        whole, start = shown.decode(errors="surrogateescape"), 0
        while start < len(whole):
            end = start + _PIECE
            if end < len(whole):  # split at line ends: a follower receives records of several hosts interleaved
                end = whole.rfind("\n", start, end) + 1 or end
            self._run_log.append({**self._record, "text": whole[start:end]})
            start = end

    def close(self) -> None:
        """Do nothing: the log outlives the rank."""
