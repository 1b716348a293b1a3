# SPDX-License-Identifier: BSD-3-Clause
"""The log of one replica, ``combined.log``: whole lines from its two pipes, in the order in which they ended.

Of what ranks print, it has references to their own files (``system.log_references``). A log that cannot be written (a
full disk) loses text. The lost bytes are counted; the job is never blocked. Beside it is an index, ``combined.idx``,
of records of (offset, time, stream), each at the start of a line. A new stream has a record, and after RESOLUTION
seconds the next line. A line's time is that of the last record at or before it, so it is right to RESOLUTION.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time

from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import LONGEST, LineOutput, complete
from torchx_monarch.system.log_references import MARK

STDOUT = "stdout"
STDERR = "stderr"

LOG = "combined.log"
INDEX = "combined.idx"

STREAMS = ("", STDOUT, STDERR)
"""The streams, as they are numbered in the index; the supervisor's own lines belong to stderr."""

#: Seconds between two records of the index.
RESOLUTION = 0.1
#: One record of the index: offset in bytes, seconds since the epoch, number of the stream.
RECORD = struct.Struct("<QdB")

#: Seconds that the combined log holds an unfinished line, if it is no longer than ``line_output.LONGEST``.
PATIENCE = 0.2

#: Bytes read from a pipe at a time: the capacity of a pipe.
CHUNK = 64 * 1024


class ReplicaLog:
    """The log of one replica, across all its starts. Writing never raises, and waits for nothing but the disk.

    Attributes:
        lost: how many bytes could not be written.
        reason: why bytes could not be written; empty if all were.
    """

    def __init__(self, folder: str) -> None:
        self.lost = 0
        self.reason = ""
        self._fd = self._open(os.path.join(folder, LOG), os.O_APPEND)
        self._index = self._open(os.path.join(folder, INDEX))
        self._size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        self._records = os.fstat(self._index).st_size // RECORD.size if self._index >= 0 else 0
        self._is_line_start = True
        self._indexed = "", 0.0
        """Stream and time of the last record of the index."""
        self._pending = {STDOUT: b"", STDERR: b""}
        self._since = {STDOUT: 0.0, STDERR: 0.0}
        self._lines = LineOutput()

    def _open(self, path: str, more: int = 0) -> int:
        try:
            return safe_files.open_file(path, os.O_WRONLY | os.O_CREAT | more)
        except OSError as e:
            self.reason = e.strerror or str(e)
            return -1

    def feed(self, stream: str, data: bytes) -> None:
        """Write data that was read from the pipe of STDOUT or STDERR."""
        pending = self._pending[stream] + data if self._pending[stream] else data
        end = pending.rfind(b"\n") + 1
        if end:
            self._write(stream, self._lines.place(stream, pending[:end]))
            pending = pending[end:]
        if len(pending) > LONGEST:
            whole = complete(pending)
            self._write(stream, self._lines.place(stream, pending[:whole]))
            pending = pending[whole:]
        if pending and (end or not self._pending[stream]):
            self._since[stream] = time.monotonic()
        self._pending[stream] = pending

    def flush_old(self, now: float = math.inf) -> float:
        """Write the unfinished lines that have waited for PATIENCE seconds, or all; no part of a reference before that.

        Returns:
            When (``time.monotonic``) to call this again; infinite if no line is unfinished.
        """
        for stream, data in self._pending.items():
            if data and self._since[stream] + PATIENCE <= now and (now == math.inf or not data.startswith(MARK)):
                self._write(stream, self._lines.place(stream, data))
                self._pending[stream] = b""
        waiting = (stream for stream, data in self._pending.items() if data and not data.startswith(MARK))
        return min((self._since[stream] + PATIENCE for stream in waiting), default=math.inf)

    def say(self, text: str) -> None:
        """Write messages of the supervisor, each line marked with ``[monarch]``."""
        self.flush_old()
        if lines := b"".join(f"[monarch] {line}\n".encode(errors="surrogateescape") for line in text.splitlines()):
            self._write(STDERR, self._lines.place(self, lines))

    def end_lines(self) -> None:
        """Write the rest of an ended process' output and end its unfinished lines: the next start begins a new line."""
        self.flush_old()
        for stream in (STDOUT, STDERR):
            self._write(stream, self._lines.end(stream))

    def close(self) -> None:
        """Write the rest of the output and close the files."""
        self.flush_old()
        for fd in (self._fd, self._index):
            if fd >= 0:
                os.close(fd)
        self._fd = self._index = -1

    def _write(self, stream: str, data: bytes) -> None:
        """Append data; count the bytes that cannot be written in ``lost``."""
        if not self._is_line_start and data.startswith(b"\n"):  # it ends a line, which may be one of the other stream
            self._append(data[:1])
            data = data[1:]
        if data:
            self._add_record(stream, data)
            self._append(data)

    def _append(self, data: bytes) -> None:
        done = 0
        while done < len(data) and self._fd >= 0:
            try:
                done += os.write(self._fd, data[done:] if done else data)
            except OSError as e:
                self.reason = e.strerror or str(e)
                break
        self._size += done
        self.lost += len(data) - done
        if done:
            self._is_line_start = data[done - 1 : done] == b"\n"

    def _add_record(self, stream: str, data: bytes) -> None:
        last_stream, last_time = self._indexed
        now = time.time()
        if stream == last_stream and now - last_time < RESOLUTION:
            return
        offset = self._size
        if not self._is_line_start:
            # A record must be at the start of a line, so that the unfinished line keeps the time at which it began.
            newline = data.find(b"\n")
            if newline < 0 or newline + 1 == len(data):
                return
            offset += newline + 1
        record = RECORD.pack(offset, now, STREAMS.index(stream))
        with contextlib.suppress(OSError):
            # The next record takes the place of one of which a full disk has only a part.
            if os.pwrite(self._index, record, self._records * RECORD.size) == RECORD.size:
                self._records += 1
                self._indexed = stream, now
