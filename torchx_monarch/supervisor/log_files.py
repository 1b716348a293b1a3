# SPDX-License-Identifier: BSD-3-Clause
"""The log files of one replica: copy its pipes to them, and read them whole, in part, or while they are written.

    stdout.log, stderr.log   the bytes as received
    combined.log             whole lines of both, in the order in which they ended

A log that cannot be written (a full disk) loses text. The lost bytes are counted; the job is never blocked. Beside each
log is a sparse index of times, ``<log>.idx``: records of (offset, time), each at the start of a line, at most one in
RESOLUTION seconds. A line's time is that of the last record at or before it, so it is right to RESOLUTION.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import os
import struct
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from torchx_monarch.backends.core.timed_line import LogQuery, TimedLine
from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import LONGEST, LineOutput, LineReader, complete
from torchx_monarch.system.processes import limit_hint

STDOUT = "stdout"
STDERR = "stderr"
COMBINED = "combined"

#: Seconds between two records of the index.
RESOLUTION = 0.1
#: One record of the index: offset in bytes, seconds since the epoch.
RECORD = struct.Struct("<Qd")

#: Seconds that the combined log holds an unfinished line, if it is no longer than ``line_output.LONGEST``.
PATIENCE = 0.2

#: Bytes read from a pipe at a time: the capacity of a pipe.
CHUNK = 64 * 1024

#: Seconds between two reads of a log that is followed.
_POLL = 0.05
#: Reads of the log for each check of the app's state, which costs more.
_READS_PER_CHECK = 4

_MAX_TAIL = 1 << 24
"""Bytes at the end of a log in which its last lines are looked for."""

_LATEST = 1e11
"""The latest time of a sound record, in the year 5138: ``datetime`` has none after the year 9999."""


class LogFile:
    """One append-only log and its index of times. Writing never raises, and waits for nothing but the disk.

    Attributes:
        lost: how many bytes could not be written.
        reason: why bytes could not be written; empty if all were.
    """

    def __init__(self, folder: str, stream: str) -> None:
        self.lost = 0
        self.reason = ""
        self._fd = self._open(os.path.join(folder, f"{stream}.log"))
        self._index = self._open(os.path.join(folder, f"{stream}.log.idx"))
        self._size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        self.at_line_start = True
        self._indexed = 0.0

    def _open(self, path: str) -> int:
        try:
            return safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as e:
            self.reason = e.strerror or str(e)
            return -1

    def write(self, data: bytes) -> None:
        """Append data; count the bytes that cannot be written in ``lost``."""
        if not data:
            return
        self._note_time(data)
        done = self._append(data)
        self.lost += len(data) - done
        if done:
            self.at_line_start = data[done - 1 : done] == b"\n"

    def _append(self, data: bytes) -> int:
        done = 0
        while done < len(data) and self._fd >= 0:
            try:
                done += os.write(self._fd, data[done:] if done else data)
            except OSError as e:
                self.reason = e.strerror or str(e)
                break
        self._size += done
        return done

    def _note_time(self, data: bytes) -> None:
        now = time.time()
        if now - self._indexed < RESOLUTION:
            return
        offset = self._size
        if not self.at_line_start:
            # A record must be at the start of a line, so that the unfinished line keeps the time at which it began.
            newline = data.find(b"\n")
            if newline < 0 or newline + 1 == len(data):
                return
            offset += newline + 1
        try:
            os.write(self._index, RECORD.pack(offset, now))
        except OSError:
            return
        self._indexed = now

    def close(self) -> None:
        for fd in (self._fd, self._index):
            if fd >= 0:
                os.close(fd)
        self._fd = self._index = -1


class ReplicaLogs:
    """The three logs of one replica, across all its starts."""

    def __init__(self, folder: str) -> None:
        self._files = {stream: LogFile(folder, stream) for stream in (STDOUT, STDERR, COMBINED)}
        self._pending = {STDOUT: b"", STDERR: b""}
        self._since = {STDOUT: 0.0, STDERR: 0.0}
        self._lines = LineOutput()

    @property
    def lost(self) -> int:
        """Bytes of output that are missing from a log."""
        return max(self._files[STDOUT].lost + self._files[STDERR].lost, self._files[COMBINED].lost)

    @property
    def reason(self) -> str:
        """Why bytes were lost; "" if none were."""
        return next((file.reason for file in self._files.values() if file.lost), "")

    def feed(self, stream: str, data: bytes) -> None:
        """Write data that was read from the pipe of STDOUT or STDERR."""
        self._files[stream].write(data)
        pending = self._pending[stream] + data if self._pending[stream] else data
        end = pending.rfind(b"\n") + 1
        if end:
            self._combine(stream, pending[:end])
            pending = pending[end:]
        if len(pending) > LONGEST:
            whole = complete(pending)
            self._combine(stream, pending[:whole])
            pending = pending[whole:]
        if pending and (end or not self._pending[stream]):
            self._since[stream] = time.monotonic()
        self._pending[stream] = pending

    def _combine(self, stream: str, data: bytes) -> None:
        self._files[COMBINED].write(self._lines.place(stream, data))

    def flush_old(self, now: float = math.inf) -> float:
        """Write to the combined log the unfinished lines that have waited for PATIENCE seconds, or all.

        Returns:
            When (``time.monotonic``) to call this again; infinite if no line is unfinished.
        """
        for stream, data in self._pending.items():
            if data and self._since[stream] + PATIENCE <= now:
                self._combine(stream, data)
                self._pending[stream] = b""
        return min((self._since[s] + PATIENCE for s, data in self._pending.items() if data), default=math.inf)

    def say(self, text: str) -> None:
        """Write messages of the supervisor to the stderr and combined logs, each line marked with ``[monarch]``."""
        self.flush_old()
        lines = b"".join(b"[monarch] " + line.encode(errors="surrogateescape") + b"\n" for line in text.splitlines())
        stderr = self._files[STDERR]
        stderr.write(lines if stderr.at_line_start else b"\n" + lines)
        if lines:
            self._files[COMBINED].write(self._lines.place(self, lines))

    def end_lines(self) -> None:
        """Write the rest of an ended process' output and end its unfinished lines: the next start begins a new line."""
        self.flush_old()
        for stream in (STDOUT, STDERR):
            self._files[COMBINED].write(self._lines.end(stream))

    def close(self) -> None:
        """Write the rest of the output and close the files."""
        self.flush_old()
        for file in self._files.values():
            file.close()


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
    stream, since, until = query.stream or COMBINED, query.since, query.until
    path = os.path.join(log_dir, f"{stream}.log")
    with contextlib.closing(TimeIndex(os.path.join(log_dir, f"{stream}.log.idx"), below)) as index:
        begin = start or _last_lines(path, query.tail, below)
        position = begin if since is None or start else None
        latest = math.inf if until is None else until.timestamp()
        reader = LineReader()
        passes = 0
        while True:
            # Check for the end before reading, so that text that was written just before the end is read, too.
            last = not query.follow or (passes % _READS_PER_CHECK == 0 and query.has_ended())
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
        end, size = os.fstat(fd).st_size, CHUNK
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
            yield f"[monarch] this log cannot be read: {error}{limit_hint(error)}\n".encode(errors="backslashreplace")
        return
    with open(fd, "rb") as file:
        file.seek(min(start, os.fstat(fd).st_size))  # a damaged index may have an offset beyond the end
        while data := file.read(CHUNK):
            yield data


class TimeIndex:
    """The times at which the lines of a log began; none without a readable file."""

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
