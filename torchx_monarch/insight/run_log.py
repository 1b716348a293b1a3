# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What happens in one run on a live allocation, as JSON lines in a file: written by one, followed by any number.

The file is the buffer: a follower that reads slowly, or comes late, costs no memory and holds nobody up.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from torchx_monarch.system import safe_files
from torchx_monarch.system.console import LineSink, write_all

_PIECE = 4000
"""Characters of output in one record: JSON may spend twelve bytes on each, and JSON in JSON fourteen, and a line to
replica 0 has at most 64 kB."""

_CHUNK = 1 << 18


class RunLog:
    """The records of one run.

    Attributes:
        count: records so far.
        path: the file; of mode 0600.

    Args:
        path: the file to make; its folder is made as well.

    Raises:
        OSError: it cannot be made, or is no regular file of ours: a rank of a run before can have made it.
    """

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self.path = path
        self.count = 0
        self._file = safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.ftruncate(self._file, 0)
        self._closed = False
        self._changed = asyncio.Event()

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; nothing after ``close``."""
        self.append_line(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def append_line(self, line: bytes) -> None:
        """Add a record that is encoded already, with its line feed."""
        if self._closed:
            return
        write_all(self._file, line)  # a full disk loses output, never the run
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Add what a rank has printed."""
        text = data.decode(errors="surrogateescape")
        start = 0
        while start < len(text):
            end = start + _PIECE
            if end < len(text):  # a follower has records of several hosts, which mix where no line ends
                end = text.rfind("\n", start, end) + 1 or end
            self.append({"type": "output", "rank": rank, "stream": stream, "text": text[start:end]})
            start = end

    def close(self) -> None:
        """There are no more records."""
        if not self._closed:
            self._closed = True
            os.close(self._file)
            self._changed.set()

    async def follow(self, wait: bool = True) -> AsyncIterator[list[bytes]]:
        """The records from the first on, as lines, some at a time, until the journal is closed.

        Args:
            wait: whether to wait for more when there are no more yet.

        Raises:
            OSError: somebody has put something else in the file's place.
        """
        with open(safe_files.open_file(self.path), "rb") as file:
            rest = b""
            while True:
                closed, changed = self._closed, self._changed
                data = file.read(_CHUNK)
                if not data:
                    if closed or not wait:
                        return
                    await changed.wait()
                    continue
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    yield [line + b"\n" for line in lines]


class RunLogSink:
    """Takes what a rank prints onto its host's output into the journal as well.

    Args:
        run_log: of the run.
        rank: the rank.
        stream: ``stdout`` or ``stderr``.
    """

    def __init__(self, run_log: RunLog, rank: int, stream: str) -> None:
        self._run_log = run_log
        self._rank = rank
        self._stream = stream

    def write(self, text: bytes, shown: bytes) -> None:
        """Take what is shown (see ``LineSink``)."""
        self._run_log.output(self._rank, self._stream, shown)

    def close(self) -> None:
        """The journal outlives the rank."""


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[LineSink]) -> None:
        self._sinks = sinks

    def write(self, text: bytes, shown: bytes) -> None:
        """Pass it on to each."""
        for sink in self._sinks:
            sink.write(text, shown)

    def close(self) -> None:
        """Close each."""
        for sink in self._sinks:
            sink.close()
