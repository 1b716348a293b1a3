# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank's stdout or stderr: byte for byte into its own file, in whole lines with a prefix onto the host's output."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import IO

from torchx_monarch.system import safe_files
from torchx_monarch.system.console import Console, LineSink, write_all
from torchx_monarch.system.line_output import LONGEST, complete

_CHUNK = 1 << 18

_LINES = re.compile(rb"[^\n]*\n|[^\n]+")

_DRAW_AFTER = 0.1
"""Seconds after which a progress bar is shown as it stands: what tqdm lets pass between two of its pictures."""


class OutputPipe:
    """Reads one pipe to its end.

    What arrives before ``assign`` is held: an interpreter that is started ahead has no rank yet. Memory is bounded: of
    a line that does not end, pieces of ``LONGEST`` bytes are passed on.

    Args:
        pipe: the read end; owned, and closed at the end.
        on_first: called once, when the first bytes arrive after ``assign``.
        is_shown: whether a line, without its line feed, goes onto the host's output.
    """

    def __init__(
        self, pipe: IO[bytes], on_first: Callable[[], None], is_shown: Callable[[bytes], bool] | None = None
    ) -> None:
        self.ended = asyncio.Event()
        self._pipe = pipe
        self._on_first: Callable[[], None] | None = on_first
        self._is_shown = is_shown
        self._held: list[bytes] | None = []
        self._file: int | None = None
        self._console: Console | None = None
        self._sink: LineSink | None = None
        self._prefix = b""
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._goes_on = False
        """Whether what is shown next belongs to a line of which pieces have been shown."""
        self._drawing: asyncio.TimerHandle | None = None
        os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(pipe, self._readable)

    def assign(self, path: str | None, console: Console | None, prefix: str, sink: LineSink | None = None) -> None:
        """Say where it goes.

        Args:
            path: the rank's own file; appended to. None for none.
            console: gets the prefixed lines; None for the file alone.
            prefix: stands before each line, ``[trainer3]:``; may be empty.
            sink: gets the lines as well; closed at the end.

        Raises:
            OSError: the file cannot be opened, or is no regular file of ours: an earlier rank can have made it.
        """
        if path is not None:
            self._file = safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._console = console
        self._prefix = prefix.encode()
        self._sink = sink
        held, self._held = self._held or [], None
        for data in held:
            self._feed(data)

    def drain(self) -> None:
        """Give out what is there, and end."""
        try:
            while data := os.read(self._pipe.fileno(), _CHUNK):
                self._feed(data)
        except BlockingIOError:
            pass
        self.close()

    def close(self) -> None:
        """Stop reading, whoever still holds the other end, and give out what is left."""
        if self.ended.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._pipe)
        self._pipe.close()
        if self._console is not None and self._partial:
            self._show(b"".join([*self._partial, b"\n"]))
        elif self._console is not None and self._goes_on:
            self._console.end(self)
            if self._sink is not None:
                self._sink.write(b"\n", b"\n")
        if self._drawing is not None:
            self._drawing.cancel()
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
        end = data.rfind(b"\n") + 1
        if end:
            self._show(b"".join([*self._partial, data[:end]]))
            self._keep(data[end:])
        else:
            self._partial.append(data)
            self._partial_size += len(data)
        if self._partial_size > LONGEST:
            self._show_partial()
        elif self._drawing is None and b"\r" in data[end:]:
            self._drawing = asyncio.get_running_loop().call_later(_DRAW_AFTER, self._draw)

    def _keep(self, data: bytes) -> None:
        self._partial = [data] if data else []
        self._partial_size = len(data)

    def _draw(self) -> None:
        self._drawing = None
        self._show_partial()

    def _show_partial(self) -> None:
        text = b"".join(self._partial)
        end = complete(text)
        self._keep(text[end:])
        if end:
            self._show(text[:end])

    def _show(self, text: bytes) -> None:
        """Pass on whole lines, each with its line feed, or a piece of a line."""
        assert self._console is not None
        if self._is_shown is not None:
            text = b"".join(line for line in _LINES.findall(text) if self._is_shown(line.removesuffix(b"\n")))
            if not text:
                return
        shown = text
        if self._prefix:
            ended = text.endswith(b"\n")
            shown = (text[:-1] if ended else text).replace(b"\n", b"\n" + self._prefix) + (b"\n" if ended else b"")
            if not self._goes_on:
                shown = self._prefix + shown
        if self._sink is not None:
            self._sink.write(text, shown)
        self._console.write(self, shown, self._prefix)
        self._goes_on = not text.endswith(b"\n")
