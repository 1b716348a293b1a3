# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank's stdout or stderr: byte for byte into its own file, in whole lines with a prefix onto the host's output."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from typing import IO, Protocol

_CHUNK = 1 << 18


def write_all(fd: int, data: bytes) -> bool:
    """Write everything to ``fd``; False when it cannot be (nobody reads, the disk is full)."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # whoever gave us the descriptor made it so; it is shared, and not ours to change
            select.select([], [fd], [])
        except OSError:
            return False
    return True


class LineSink(Protocol):
    """What else gets the lines that go onto the host's output (see ``FilteredFile``)."""

    def write(self, prefix: bytes, lines: bytes) -> None:
        """Take whole lines, without the last line feed."""

    def close(self) -> None:
        """There are no more."""


class RankOutput:
    """Reads one pipe to its end.

    What arrives before ``assign`` is held: an interpreter that is started ahead has no rank yet.

    Args:
        pipe: the read end; owned, and closed at the end.
        on_first: called once, when the first bytes arrive after ``assign``.
    """

    def __init__(self, pipe: IO[bytes], on_first: Callable[[], None]) -> None:
        self.ended = asyncio.Event()
        self._pipe = pipe
        self._on_first: Callable[[], None] | None = on_first
        self._held: list[bytes] | None = []
        self._file: int | None = None
        self._console: int | None = None
        self._sink: LineSink | None = None
        self._prefix = b""
        self._partial = b""
        os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(pipe, self._readable)

    def assign(self, path: str | None, console: int | None, prefix: str, sink: LineSink | None = None) -> None:
        """Say where it goes.

        Args:
            path: the rank's own file; appended to. None for none.
            console: descriptor for the prefixed lines; None for the file alone.
            prefix: stands before each line, ``[trainer3]:``; may be empty.
            sink: gets the prefixed lines as well; closed at the end.

        Raises:
            OSError: the file cannot be opened.
        """
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._console = console
        self._prefix = prefix.encode()
        self._sink = sink
        held, self._held = self._held or [], None
        for data in held:
            self._feed(data)

    def close(self) -> None:
        """Stop reading, whoever still holds the other end, and give out what is left."""
        if self.ended.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._pipe)
        self._pipe.close()
        if self._partial and self._console is not None:
            self._show(self._partial)
        if self._sink is not None:
            self._sink.close()
        if self._file is not None:
            os.close(self._file)
        self.ended.set()

    def _readable(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.close()
        elif self._held is not None:
            self._held.append(data)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        if self._file is not None:
            write_all(self._file, data)  # a full disk loses log lines, never the job
        if self._console is None:
            return
        end = data.rfind(b"\n")
        if end < 0:
            self._partial += data
            return
        whole = self._partial + data[:end]
        self._partial = data[end + 1 :]
        self._show(whole)

    def _show(self, lines: bytes) -> None:
        assert self._console is not None
        if self._sink is not None:
            self._sink.write(self._prefix, lines)
        if self._prefix:
            lines = self._prefix + lines.replace(b"\n", b"\n" + self._prefix)
        write_all(self._console, lines + b"\n")
