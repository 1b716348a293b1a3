# SPDX-License-Identifier: BSD-3-Clause
"""The output of a run on one host, until replica 0 reads it (``host_messages.ReadOutput``)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torchx_monarch.function import MAX_VALUE_BYTES, VALUE
from torchx_monarch.insight.run_log import pieces
from torchx_monarch.system import safe_files
from torchx_monarch.transport import messages

_MAX_PENDING = 1 << 20
"""Bytes of records that wait to be read before the ranks have to wait."""

_VALUE_PART = 18_000
"""Bytes of a value in one record: 24 kB as base64."""

_LAST_RECORDS = 8
"""Records of values in one message."""


class RunOutput:
    """The records of a run on this host. Ranks wait while replica 0 does not read them (see ``OutputPipe``).

    Attributes:
        token: that of the run (``BeginRun``).
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self._records = deque[str]()
        self._pending = 0
        self._waiting: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._last: Iterator[str] | None = None

    def append(self, record: dict[str, Any]) -> None:
        line = _line(record)
        self._records.append(line)
        self._pending += len(line)
        self._changed.set()

    def end(self, last: Iterator[str]) -> None:
        """End the output with some more records, which are made as they are read, in a thread."""
        if self._last is None:
            self._last = last
            self._changed.set()

    def has_room(self, otherwise: Callable[[], None]) -> bool:
        """Return whether few records wait to be read; if not, call ``otherwise`` when that is so."""
        if self._pending < _MAX_PENDING:
            return True
        self._waiting.append(otherwise)
        return False

    async def read(self) -> str:
        """Wait for records, and remove and return some; empty at the end of the run's output."""
        while not self._records and self._last is None:
            self._changed.clear()
            await self._changed.wait()
        if not self._records and self._last is not None:
            last = itertools.islice(self._last, _LAST_RECORDS)
            return await asyncio.to_thread("".join, last)
        lines, size = [], 0
        while self._records and size < messages.MAX_LINE:
            lines.append(self._records.popleft())
            size += len(lines[-1])
        self._pending -= size
        if self._pending < _MAX_PENDING:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()
        return "".join(lines)


class RunOutputSink:
    """Copy one stream of a rank from the host's output to that of its run.

    Args:
        prefix: torchrun's own prefix before each line, which clients show in a shorter form; empty if there is none, or
            one of the user's.
    """

    def __init__(self, output: RunOutput, rank: int, stream: str, prefix: str) -> None:
        self.writers = [output]
        self._output = output
        self._record = {"type": "output", "rank": rank, "stream": stream, "prefix": prefix}

    def write(self, text: bytes, shown: bytes) -> None:
        """Append ``shown``, the text with its prefixes, in pieces."""
        for piece in pieces(shown):
            self._output.append({**self._record, "text": piece})

    def refer(self, reference: bytes, shown: bytes) -> None:
        """Append a reference (``log_references``) in the place of ``shown``, unless it is empty, on replica 0."""
        if reference:
            self._output.append({**self._record, "reference": reference.decode(errors="surrogateescape")})
        else:
            self.write(b"", shown)

    def close(self) -> None:
        """Do nothing: the output of the run outlives the rank."""


def read_values(folder: str, ranks: Collection[int]) -> Iterator[str]:
    """Yield records of what a function has returned in these ranks, those of the last attempt; remove its files."""
    for rank in sorted(safe_files.numbered(folder, VALUE)):
        if rank not in ranks:
            continue  # of an earlier attempt, on other hosts
        path = os.path.join(folder, f"{VALUE}{rank}")
        try:
            content = safe_files.read_file(path, limit=MAX_VALUE_BYTES + 100)
            os.unlink(path)
        except OSError as error:  # the rank has made something else of it
            content = f"none\na value that its host cannot read: {error.strerror}".encode()
        for start in range(0, len(content), _VALUE_PART):
            part = base64.b64encode(content[start : start + _VALUE_PART]).decode()
            yield _line({"type": "value", "rank": rank, "part": part})


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
