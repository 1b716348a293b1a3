# SPDX-License-Identifier: BSD-3-Clause
"""The stdout and stderr of a host process, to which the host writes its own lines and those of its ranks.

The event loop of a host never waits for a disk or for the reader of a pipe: others would take the host for lost.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torchx_monarch.system.line_output import LineOutput
from torchx_monarch.system.safe_files import write_all

T = TypeVar("T")

_MAX_PENDING = 1 << 20
"""Bytes that wait to be written before the ranks that write to the same place have to wait."""


class WriterThread:
    """Execute writes in a thread of their own, one after the other.

    Data that cannot be written is lost. OSError says that the thread cannot be started.
    """

    _unfinished = 0
    """Number of writes of all threads that have not been executed; guarded by ``_changed``, as all counts."""

    _changed = threading.Condition()

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "writer")
        try:
            self._executor.submit(int)  # starts the thread, so that no later write can fail
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from None
        self._pending = 0
        self._waiting: list[Callable[[], None]] = []

    def write(self, fd: int, data: bytes) -> None:
        """Write to a descriptor after all earlier writes."""
        self.call(write_all, fd, data, size=len(data))

    def call(self, function: Callable[..., object], *args: object, size: int = 0) -> None:
        """Call a function, with ``size`` bytes of data in its arguments, after all earlier writes."""
        with self._changed:
            WriterThread._unfinished += 1
            self._pending += size
        self._executor.submit(self._execute, function, args, size)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function after all earlier writes, and return what it returns."""
        return await asyncio.wrap_future(self._executor.submit(function, *args))

    def _execute(self, function: Callable[..., object], args: Sequence[object], size: int) -> None:
        try:
            function(*args)
        except OSError:  # the disk is full, or nobody reads the output
            pass
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            waiting: list[Callable[[], None]] = []
            with self._changed:
                WriterThread._unfinished -= 1
                self._changed.notify_all()
                self._pending -= size
                if self._pending < _MAX_PENDING:
                    waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    def has_room(self, otherwise: Callable[[], None]) -> bool:
        """Return whether few bytes wait to be written; if not, call ``otherwise`` in the thread when that is so."""
        with self._changed:
            if self._pending < _MAX_PENDING:
                return True
            self._waiting.append(otherwise)
            return False

    def close(self, fd: int) -> None:
        """Close a descriptor after all writes, and end the thread; no writes may follow."""
        self.call(os.close, fd)
        self.end()

    def end(self) -> None:
        """End the thread after all writes; none may follow."""
        self._executor.shutdown(wait=False)

    @classmethod
    def finish(cls) -> None:
        """Wait until all writes of this process have been executed."""
        with cls._changed:
            cls._changed.wait_for(lambda: not cls._unfinished)


class ThreadedStderr(io.TextIOBase):
    """A ``sys.stderr`` that is written in a thread; what the interpreter itself prints is not."""

    def __init__(self, writer: WriterThread) -> None:
        self._writer = writer

    def write(self, text: str) -> int:
        self._writer.write(2, text.encode(errors="backslashreplace"))
        return len(text)


class Console:
    """The host's stdout or stderr, shared by the host and all of its ranks.

    Attributes:
        fd: its descriptor.

    Args:
        same: the other of the two consoles; None for the first. They share the thread, so that lines are written in
            their order; and the state of unfinished lines, if both are the same file or terminal.
    """

    def __init__(self, fd: int, same: Console | None = None) -> None:
        self.writer: WriterThread = same.writer if same is not None else WriterThread()
        self.fd = fd
        self._lines = LineOutput()
        if same is not None and os.path.samestat(os.fstat(fd), os.fstat(same.fd)):
            self._lines = same._lines

    def write(self, writer: object, text: bytes, prefix: bytes = b"") -> None:
        """Write whole lines, or part of a line that continues later (see ``LineOutput.place``)."""
        self.writer.write(self.fd, self._lines.place(writer, text, prefix))

    def write_line(self, writer: object, line: Callable[[], bytes], size: int) -> None:
        """Write the line that a function with ``size`` bytes of data returns, after all earlier writes."""
        lead = self._lines.place(writer, b"\n")[:-1]
        self.writer.call(lambda: write_all(self.fd, lead + line().removesuffix(b"\n") + b"\n"), size=size)

    def end(self, writer: object) -> None:
        """End the unfinished line of a writer that has ended."""
        self.writer.write(self.fd, self._lines.end(writer))
