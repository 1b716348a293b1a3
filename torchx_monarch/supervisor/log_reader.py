# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of one replica (``log_files``) whole, in part, or while it is written.

Its text is what stands in the log itself, and what the references there name. A position in the text is an offset in
the log; within what a reference names, also an offset in that.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import os
import time
from collections.abc import Generator, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from torchx_monarch.backends.core.snapshot import LogQuery, TimedLines
from torchx_monarch.supervisor.log_files import CHUNK, INDEX, LOG, RECORD, STREAMS
from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import LineOutput, LineReader
from torchx_monarch.system.log_references import MARK, LogReference, ReferredLogs
from torchx_monarch.system.processes import limit_hint

_POLL = 0.05
"""Seconds between two reads of a log that is followed."""

_READS_PER_CHECK = 4
"""Reads of the log for each check of the app's state, which costs more."""

_MAX_TAIL = 1 << 24
"""Bytes at the end of a log in which the start of its last line is looked for."""

_LATEST = 1e11
"""The latest time of a sound record, in the year 5138: ``datetime`` has none after the year 9999."""

_INSIDE = 1 << 48
"""A byte of what a reference names, in a position."""


def lines(log_dir: str, query: LogQuery[Any], below: str | None = None, start: int = 0) -> Iterator[TimedLines]:
    """Yield the lines of one log that a query asks for, those that follow each other at the same time together.

    Bytes that are not UTF-8 are replaced. A line longer than ``line_output.MAX_LINE_BYTES`` is split. While a log is
    followed, text after a carriage return is yielded as it stands, without a line end: TorchX prints it over the text
    before it.

    Args:
        log_dir: the folder of the replica's logs.
        below: a folder of the caller inside which no link is followed (``safe_files.open_file``). A log that is refused
            yields one line with the reason.
        start: where to go on, the ``end`` of a line that was read before; ``since`` and ``tail`` do not count then.
    """
    since, until = query.since, query.until
    with (
        contextlib.closing(LogIndex(os.path.join(log_dir, INDEX), below)) as index,
        contextlib.closing(LogText(log_dir, index, query, below)) as text,
    ):
        position = start or text.last_lines(query.tail)
        found = 0 if since is None or start else None
        latest = math.inf if until is None else until.timestamp()
        reader, passes = LineReader(), 0
        piece, before = _Piece(b"", position, 0, position), 0  # the last one, and how many bytes came before it
        while True:
            # Check for the end before reading, so that text that was written just before the end is read, too.
            last = not query.follow or (passes % _READS_PER_CHECK == 0 and query.has_ended())
            passes += 1
            index.refresh()
            if found is None and (found := index.offset_of(since)) is not None:
                piece = piece._replace(end=max(position, found))
            text.close()  # a log that is followed may be one of thousands
            for following in () if found is None else text.read(piece.end, last):
                piece, before = following, before + len(piece.text)
                if reader.position == before:  # it begins a line
                    position = piece.start
                for ended in reader.feed(piece.text):
                    if (when := index.time_of(position % _INSIDE)) >= latest:
                        return
                    position = piece.position(reader.position - before)
                    yield TimedLines(when, ended.decode(errors="replace"), position)
            if rest := reader.rest() if last else reader.pending_progress():
                if (when := index.time_of(position % _INSIDE)) >= latest:
                    return
                position = piece.position(reader.position - before)
                yield TimedLines(when, rest.decode(errors="replace"), position)
            if last:
                return
            time.sleep(_POLL)


class _Piece(NamedTuple):
    """A piece of the text of a log.

    Attributes:
        start: the position of its first byte.
        step: what each byte adds to the position.
        end: the position after its last byte.
    """

    text: bytes
    start: int
    step: int
    end: int

    def position(self, size: int) -> int:
        """Return the position after its first bytes, so many; not before its start."""
        return self.end if size == len(self.text) else self.start + max(0, size) * self.step


class LogText:
    """Read the text of a log.

    Args:
        folder: the folder of the replica's logs.
        query: says which stream and ranks to read, and whether the app has ended.
        below: as for ``lines``.
    """

    def __init__(self, folder: str, index: LogIndex, query: LogQuery[Any], below: str | None) -> None:
        self._folder = folder
        self._index = index
        self._query = query
        self._below = below
        self._lines = LineOutput()
        self._referred = ReferredLogs(folder, below)

    def close(self) -> None:
        """Close the logs of ranks."""
        self._referred.close()

    def read(self, position: int, is_last: bool) -> Iterator[_Piece]:
        """Yield the text from a position to its present end, which is before a reference whose bytes are not there yet.

        Args:
            is_last: whether to say of an app that has ended that these bytes are missing, and go on.
        """
        offset, skipped = position % _INSIDE, position // _INSIDE
        try:
            fd = safe_files.open_file(os.path.join(self._folder, LOG), below=self._below)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if position == 0:
                reason = f"[monarch] this log cannot be read: {error}{limit_hint(error)}\n"
                yield _Piece(reason.encode(errors="backslashreplace"), 0, 0, 1)
            return
        with open(fd, "rb", buffering=0):
            offset = min(offset, os.fstat(fd).st_size)  # a damaged index may have an offset beyond the end
            is_line_start = not offset or os.pread(fd, 1, offset - 1) == b"\n"
            while data := os.pread(fd, CHUNK, offset):
                self._index.refresh()
                begin = 0
                while begin < len(data):
                    if is_line_start and data.startswith(MARK, begin):
                        end = data.find(b"\n", begin) + 1
                        if not end and (begin or len(data) < CHUNK):
                            break
                        if end and (reference := LogReference.parse(data[begin : end - 1])):
                            if not (yield from self._named(reference, offset + begin, offset + end, skipped, is_last)):
                                return
                            begin, skipped = end, 0
                            continue
                    end = data.find(b"\n" + MARK, begin) + 1 or len(data)
                    yield from self._own(data[begin:end], offset + begin)
                    is_line_start = data.endswith(b"\n", begin, end)
                    begin = end
                if not begin:
                    return
                offset += begin

    def _own(self, text: bytes, offset: int) -> Iterator[_Piece]:
        """Yield text of the log itself."""
        for start, end in self._index.of_stream(offset, offset + len(text), self._query.stream):
            part = text[start - offset : end - offset]
            placed = self._lines.place("", part)
            yield _Piece(placed[: len(placed) - len(part)], start, 0, start)
            yield _Piece(part, start, 1, end)
        yield _Piece(b"", offset + len(text), 0, offset + len(text))

    def _named(
        self, named: LogReference, start: int, end: int, skip: int, is_last: bool
    ) -> Generator[_Piece, None, bool]:
        """Yield the text that a reference names, without its first bytes; return whether it was there, or is given up.

        Args:
            start, end: the positions of the reference and of what follows it.
        """
        shown: bytes | None = b""
        if not self._is_left_out(named):
            shown = self._referred.shown(named)
            if shown is None and not (is_last and self._query.has_ended()):
                return False
            is_missing = named.size and not shown
            note = self._referred.why_incomplete(named.name, is_dropped=shown is not None) if is_missing else b""
            if note:
                yield _Piece(self._lines.place("", note), start, 0, start)
        if shown:
            placed = self._lines.place(named.name, shown, named.prefix)
            yield _Piece(placed[: len(placed) - len(shown)], start, 0, start)
            yield _Piece(shown[skip:], start + skip * _INSIDE, _INSIDE, end)
        else:
            yield _Piece(b"" if named.size else self._lines.end(named.name), start, 0, end)
        return True

    def _is_left_out(self, named: LogReference) -> bool:
        ranks = self._query.ranks
        return self._query.stream not in ("", named.stream) or bool(ranks) and not any(named.rank in r for r in ranks)

    def last_lines(self, count: int) -> int:
        """Return a position at the start of a line that has at least ``count`` lines from it to the end.

        0 for no count or no such. Where lines are very long it is within one, _MAX_TAIL before the end.
        """
        try:
            fd = safe_files.open_file(os.path.join(self._folder, LOG), below=self._below)
        except OSError:
            return 0
        with open(fd, "rb", buffering=0):
            end, rest = os.fstat(fd).st_size, b""
            while count > 0 and end > 0:
                begin = max(0, end - CHUNK)
                data = os.pread(fd, end - begin, begin) + rest
                first = data.find(b"\n") + 1 if begin else 0
                if len(data) - first >= _MAX_TAIL:
                    return begin
                at = begin + len(data)
                *ended, unfinished = data[first:].split(b"\n") if first or not begin else [data]
                if not ended and begin:
                    end, rest = begin, data
                    continue
                for size, line in ((len(unfinished), unfinished), *((len(line) + 1, line) for line in reversed(ended))):
                    at -= size
                    count -= self._count(line) if size else 0
                    if count <= 0:
                        return at
                end, rest = begin, data[:first]
        return 0

    def _count(self, line: bytes) -> int:
        """Return how many lines of the text a line of the log stands for; at least 1 if it is not left out."""
        if reference := LogReference.parse(line):
            if self._is_left_out(reference) or not reference.size:
                return 0
            text = self._referred.read(reference.name, reference.offset, reference.size)
            return max(1, text.count(b"\n")) if text else 0
        return 1


class LogIndex:
    """The times at which the lines of a log began, and their streams; none without a readable file."""

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

        Calls in the order of a log read the index only once.
        """
        self._go_to(offset)
        time = self._record(self._at)[1] if self._at >= 0 else 0.0
        return time if 0.0 <= time <= _LATEST else 0.0  # not NaN either

    def of_stream(self, start: int, end: int, stream: str) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range of a log, each of one record, that belong to a stream, or to an unknown one."""
        while start < end:
            self._go_to(start)
            following = self._record(self._at + 1)[0] if self._at + 1 < self._count else end
            until = following if start < following < end else end
            found = self._record(self._at)[2] if self._at >= 0 else 0
            if not stream or found >= len(STREAMS) or STREAMS[found] in ("", stream):
                yield start, until
            start = until

    def _go_to(self, offset: int) -> None:
        """Find the last record at or before an offset; -1 for none."""
        if not 0 <= self._at < self._count or self._record(self._at)[0] > offset:
            self._at = bisect.bisect_right(range(self._count), offset, key=lambda at: self._record(at)[0]) - 1
        while self._at + 1 < self._count and self._record(self._at + 1)[0] <= offset:
            self._at += 1

    def _read_record(self, at: int) -> tuple[int, float, int]:
        offset, time, stream = RECORD.unpack(os.pread(self._fd, RECORD.size, at * RECORD.size))
        return offset, time, stream
