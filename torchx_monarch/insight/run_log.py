# SPDX-License-Identifier: BSD-3-Clause
"""The log of one run on a live allocation: JSON lines in a file, with one writer and any number of followers.

What ranks of replica 0 have printed is in their own logs, to which it refers (``system.log_references``).

The file is the buffer. A follower that reads slowly or starts late costs no memory and delays neither the run nor other
followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from torchx_monarch.system import safe_files
from torchx_monarch.system.console import WriterThread
from torchx_monarch.system.log_references import LogReference, ReferredLogs

_CHUNK = 1 << 18

_PIECE = 4000
"""Most characters of output in one record, so that a message of records is far shorter than it may be."""

_REFERENCE = b'"reference":"'
"""Is in a record with a reference, and not in text, whose quotation marks are escaped."""

_MAX_PENDING = 1 << 20
"""Bytes of records that wait to be written before hosts have to wait."""


class RunLog:
    """The records of one run, in a file of mode 0600 that it creates; ``loop`` is that of its followers.

    Raises:
        OSError: the file cannot be created, or is not a regular file of this user. A rank of an earlier run can have
            put something else in its place.
    """

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self._path = path
        self._writer = WriterThread()
        self._file = safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.ftruncate(self._file, 0)
        self._closed = False
        self._requested = self._appended = 0  # bytes
        self._loop = loop
        self._changed = asyncio.Event()

    def append(self, record: dict[str, Any]) -> None:
        """Append a record; do nothing after ``close``."""
        self.append_lines(_encoded(record))

    def append_lines(self, lines: bytes) -> None:
        """Append records that are encoded already, each with its line feed; do nothing after ``close``."""
        if not self._closed:
            self._requested += len(lines)
            self._writer.call(self._append, lines)

    def _append(self, lines: bytes) -> None:
        before = os.fstat(self._file).st_size
        try:
            safe_files.write_all(self._file, lines)
        except OSError:  # a full disk loses output, but does not end the run
            written = lines[: os.fstat(self._file).st_size - before]
            os.ftruncate(self._file, before + written.rfind(b"\n") + 1)
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._has_appended, len(lines))

    def _has_appended(self, size: int) -> None:
        self._appended += size
        self._wake()

    async def room(self) -> None:
        """Wait until few records wait to be written."""
        while self._requested - self._appended >= _MAX_PENDING:
            await self._changed.wait()

    def close(self) -> None:
        """Mark the log as complete; later records are dropped."""
        if not self._closed:
            self._closed = True
            self._writer.close(self._file)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _open(self) -> io.FileIO:
        return open(safe_files.open_file(self._path), "rb", buffering=0)

    async def follow(self, wait: bool = True) -> AsyncIterator[list[bytes]]:
        """Yield the records from the first on, as lists of lines, until the log is closed.

        Without ``wait`` the iteration ends with the last record that was appended before it began.

        Raises:
            OSError: another file is in the place of the log.
        """
        requested, offset, size = self._requested, 0, _CHUNK
        logs = ReferredLogs(os.path.dirname(os.path.dirname(self._path)))
        with await asyncio.to_thread(self._open) as file, contextlib.closing(logs):
            while True:
                # All before the read, so that what is written after it wakes this follower.
                ends, appended, changed = self._closed or not wait, self._appended, self._changed
                last = self._requested if self._closed else requested
                data = await asyncio.to_thread(os.pread, file.fileno(), size, offset)
                whole = data.rfind(b"\n") + 1  # a disk that is full has a part of a record for a moment
                if not whole and len(data) == size:
                    size *= 2
                    continue
                if not whole:
                    if ends and appended >= last:
                        return
                    logs.close()
                    await changed.wait()
                    continue
                offset, size = offset + whole, _CHUNK
                plain: list[bytes] = []
                for line in data[: whole - 1].split(b"\n"):
                    if _REFERENCE not in line:
                        plain.append(line + b"\n")
                        continue
                    if plain:
                        yield plain
                    plain = []
                    yield await asyncio.to_thread(_resolved, line, logs)
                if plain:
                    yield plain


def pieces(text: bytes) -> Iterator[str]:
    """Split output into the texts of records."""
    whole, start = text.decode(errors="surrogateescape"), 0
    while start < len(whole):
        end = start + _PIECE
        if end < len(whole):  # split at line ends: a follower receives records of several hosts interleaved
            end = whole.rfind("\n", start, end) + 1 or end
        yield whole[start:end]
        start = end


def _resolved(line: bytes, logs: ReferredLogs) -> list[bytes]:
    """Return a record with a reference as records with what that names."""
    record = json.loads(line)
    reference = LogReference.parse(record.pop("reference").rstrip("\n").encode(errors="surrogateescape"))
    text = b"\n"  # the end of a line
    if reference is not None and reference.size:
        shown = logs.shown(reference)
        text = shown or logs.why_incomplete(reference.name, is_dropped=shown is not None)
    return [_encoded({**record, "text": piece}) for piece in pieces(text)]


def _encoded(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
