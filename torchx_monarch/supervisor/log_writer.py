# SPDX-License-Identifier: BSD-3-Clause
"""Copy a replica's pipes to its log files.

    stdout.log, stderr.log   the bytes as received
    combined.log             whole lines of both, in the order in which they ended

A log that cannot be written (a full disk) loses text. The lost bytes are counted, and noted in the log when the disk
has room again; the job is never blocked. Beside each log is a sparse index of times, ``<log>.idx``: records of (offset,
time), each at the start of a line, at most one in RESOLUTION seconds. A line's time is that of the last record at or
before it, so it is right to RESOLUTION.
"""

from __future__ import annotations

import math
import os
import struct
import time

from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import LONGEST, LineOutput, complete

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


def log_name(stream: str) -> str:
    return f"{stream}.log"


def index_name(stream: str) -> str:
    return f"{stream}.log.idx"


class LogFile:
    """One append-only log and its index of times. Writing never raises, and waits for nothing but the disk.

    Attributes:
        lost: how many bytes could not be written.
        reason: why bytes could not be written; empty if all were.
    """

    def __init__(self, folder: str, stream: str) -> None:
        self.lost = 0
        self.reason = ""
        self._unreported = 0
        self._fd = self._open(os.path.join(folder, log_name(stream)))
        self._index = self._open(os.path.join(folder, index_name(stream)))
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
        if self._unreported:
            note = b"\n[monarch] %d bytes of output were lost here: %s\n" % (self._unreported, self.reason.encode())
            if self._append(note) == len(note):
                self._unreported = 0
        self._note_time(data)
        done = self._append(data)
        if done < len(data):
            self.lost += len(data) - done
            self._unreported += len(data) - done
        if done:
            self.at_line_start = data[done - 1 : done] == b"\n"

    def _append(self, data: bytes) -> int:
        """Write as much as the disk has room for; return the number of bytes written."""
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
