# SPDX-License-Identifier: BSD-3-Clause
"""Read the index of times beside a log, which ``log_writer`` writes while it is read."""

from __future__ import annotations

import bisect
import os
from datetime import datetime

from torchx_monarch.supervisor.log_writer import RECORD
from torchx_monarch.system import safe_files

_BLOCK = 4096
"""Records that are read at a time."""

_LATEST = 1e11
"""The latest time of a sound record, in the year 5138: ``datetime`` has none after the year 9999."""


class TimeIndex:
    """The times at which the lines of a log began, right to ``log_writer.RESOLUTION``.

    Without a readable file, no time is known.

    Args:
        path: the file; it need not exist yet.
        below: a folder of the caller inside which no link is followed (``safe_files.open_file``); None for no check.
    """

    def __init__(self, path: str, below: str | None) -> None:
        self._path = path
        self._below = below
        self._fd = -1
        self._count = 0
        self._blocks: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._at = -1

    def refresh(self) -> None:
        """Notice the records that were written since the last call."""
        try:
            if self._fd < 0:
                self._fd = safe_files.open_file(self._path, below=self._below)
            self._count = os.fstat(self._fd).st_size // RECORD.size
        except OSError:
            self._count = 0

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def offset_of(self, when: datetime) -> int | None:
        """Return where the first line written at or after ``when`` starts; None if it is not written yet."""
        moment = when.timestamp()
        found = bisect.bisect_left(range(self._count), moment, key=lambda at: self._record(at)[1])
        return self._record(found)[0] if found < self._count else None

    def time_of(self, offset: int) -> float:
        """Return when the line that starts at an offset was written, in seconds since the epoch; 0 if unknown.

        Calls for the lines of a log in their order read the index only once.
        """
        if not 0 <= self._at < self._count or self._record(self._at)[0] > offset:
            self._at = bisect.bisect_right(range(self._count), offset, key=lambda at: self._record(at)[0]) - 1
        while self._at + 1 < self._count and self._record(self._at + 1)[0] <= offset:
            self._at += 1
        time = self._record(self._at)[1] if self._at >= 0 else 0.0
        return time if 0.0 <= time <= _LATEST else 0.0  # not NaN either

    def _record(self, at: int) -> tuple[int, float]:
        """Return the offset and the time of a record."""
        first = at - at % _BLOCK
        key = (first, min(_BLOCK, self._count - first))
        if key not in self._blocks:
            data = os.pread(self._fd, key[1] * RECORD.size, first * RECORD.size)
            self._blocks = {key: list(RECORD.iter_unpack(data[: len(data) - len(data) % RECORD.size]))}
        return self._blocks[key][at - first]
