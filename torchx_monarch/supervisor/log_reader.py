# SPDX-License-Identifier: BSD-3-Clause
"""Read logs and their time index: whole, from and to a time, filtered, or followed until the app has ended."""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from torchx_monarch.backends.core.timed_line import LogQuery, TimedLine
from torchx_monarch.supervisor import log_writer
from torchx_monarch.supervisor.log_writer import RECORD
from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import LineReader
from torchx_monarch.system.open_files import hint

#: Seconds between two reads of a log that is followed.
_POLL = 0.05
#: Reads of the log for each check of the app's state, which costs more.
_READS_PER_CHECK = 4

_MAX_TAIL = 1 << 24
"""Bytes at the end of a log in which its last lines are looked for."""

_LATEST = 1e11
"""The latest time of a sound record, in the year 5138: ``datetime`` has none after the year 9999."""


def lines(log_dir: str, query: LogQuery[Any], below: str | None = None, start: int = 0) -> Iterator[TimedLine]:
    """Yield the lines of one log that a query asks for.

    Bytes that are not UTF-8 are replaced. A line longer than ``line_output.MAX_LINE_BYTES`` is split. While a log is
    followed, text after a carriage return is yielded as it stands, without a line end: TorchX prints it over the text
    before it.

    Args:
        log_dir: the folder of the replica's logs.
        below: a folder of the caller inside which no link is followed (``safe_files.open_file``). A log that is refused
            yields one line with the reason.
        start: where to go on, the ``end`` of a line that was read before; ``since`` and ``tail`` do not count then.
    """
    stream, since, until = query.stream or log_writer.COMBINED, query.since, query.until
    path = os.path.join(log_dir, log_writer.log_name(stream))
    with contextlib.closing(TimeIndex(os.path.join(log_dir, log_writer.index_name(stream)), below)) as index:
        begin = start or _last_lines(path, query.tail, below)
        position = begin if since is None or start else None
        latest = math.inf if until is None else until.timestamp()
        reader = LineReader()
        passes = 0
        while True:
            # Check for the end before reading, so that text that was written just before the end is read, too.
            is_past = time.time() > latest + 2 * log_writer.RESOLUTION
            last = not query.follow or is_past or (passes % _READS_PER_CHECK == 0 and query.has_ended())
            passes += 1
            index.refresh()
            if position is None and (found := index.offset_of(since)) is not None:
                position = begin = max(begin, found)
            for data in () if position is None else _chunks(path, position, below):
                position = (position or 0) + len(data)
                index.refresh()
                at = begin + reader.position
                for line in reader.feed(data):
                    if (when := index.time_of(at)) >= latest:
                        return
                    at = begin + reader.position
                    yield TimedLine(when, line.decode(errors="replace"), at)
            when = index.time_of(begin + reader.position)
            if when < latest and (rest := reader.rest() if last else reader.pending_progress()):
                yield TimedLine(when, rest.decode(errors="replace"), begin + reader.position)
            if last:
                return
            time.sleep(_POLL)


def _last_lines(path: str, count: int, below: str | None) -> int:
    """Return where a line starts that has at least ``count`` lines from it to the end; 0 for no count or no such.

    Where lines are very long it is within one, _MAX_TAIL before the end.
    """
    try:
        fd = safe_files.open_file(path, below=below)
    except OSError:
        return 0
    with open(fd, "rb") as file:
        end, size = os.fstat(fd).st_size, log_writer.CHUNK
        while count and size < end:
            file.seek(end - size)
            data = file.read(size)
            if data.count(b"\n") > count:
                return end - size + data.index(b"\n") + 1
            if size >= _MAX_TAIL:
                return end - size
            size *= 4
    return 0


def _chunks(path: str, start: int, below: str | None) -> Iterator[bytes]:
    try:
        fd = safe_files.open_file(path, below=below)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if start == 0:
            yield f"[monarch] this log cannot be read: {error}{hint(error)}\n".encode(errors="backslashreplace")
        return
    with open(fd, "rb") as file:
        file.seek(min(start, os.fstat(fd).st_size))  # a damaged index may have an offset beyond the end
        while data := file.read(log_writer.CHUNK):
            yield data


class TimeIndex:
    """The times at which the lines of a log began, right to ``log_writer.RESOLUTION``; none without a readable file."""

    def __init__(self, path: str, below: str | None) -> None:
        self._path = path
        self._below = below
        self._fd = -1
        self._count = 0
        self._record = functools.lru_cache(maxsize=4096)(self._read_record)
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

    def offset_of(self, when: datetime | None) -> int | None:
        """Return where the first line written at or after ``when`` starts; None if there is none yet, or no time."""
        if when is None:
            return None
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

    def _read_record(self, at: int) -> tuple[int, float]:
        offset, time = RECORD.unpack(os.pread(self._fd, RECORD.size, at * RECORD.size))
        return offset, time
