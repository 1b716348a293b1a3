# SPDX-License-Identifier: BSD-3-Clause
"""The logs of the ranks of a host, of which the oldest parts are dropped under ``-cfg log_limit``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from torchx_monarch.host.ranks.run_output import RunOutputSink
from torchx_monarch.system import safe_files
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.system.log_references import PARTS, LogReference

_MUCH = 10 * 10**9
"""Bytes of the logs of a host after which it says so."""

_SCARCE = 2 * 10**9
"""Free bytes of a disk below which the host says so."""

_CHECK = 1 << 26
"""Bytes of logs between two looks at the disk."""


class LogSpace:
    """The space that the logs of a host's ranks may take, and take.

    Args:
        say: shows a line of the host.
        limit: bytes of each log of which three quarters at least are kept; 0 for all.
        referred: the folder of the logs to which the host's output has references; empty for none.
    """

    def __init__(self, say: Callable[[str], None], limit: int = 0, referred: str = "") -> None:
        self.limit = limit
        self.referred = referred
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._written = 0
        self._said = set[str]()

    def add(self, path: str, size: int) -> None:
        """Count bytes that were written to a log, in its thread; say it once if there are many, or the disk is full."""
        before, self._written = self._written, self._written + size
        if self._written >= _MUCH:
            hint = "" if self.limit else "; -cfg log_limit=SIZE drops the oldest of each"
            self.say("passed", f"the logs of this host's ranks have passed {_MUCH / 1e9:g} GB{hint}")
        if before // _CHECK < self._written // _CHECK:
            disk = os.statvfs(os.path.dirname(path))
            if (free := disk.f_bavail * disk.f_frsize) < _SCARCE:
                self.say("free", f"the disk of the ranks' logs has {free / 1e9:.1f} GB left: {path}")

    def say(self, reason: str, text: str) -> None:
        """Show a line, the first for its reason."""
        if reason not in self._said:
            self._said.add(reason)
            self.call(self._say, text)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function, *args)


class RankLog:
    """Write what a rank prints, byte for byte, in a thread; a full disk loses bytes.

    Attributes:
        writer: the thread: that of ``console``, so that references follow what they name.
        copy: another destination of references; None for none.

    Args:
        console: where ``pass_on`` writes references; None if the reader of the host's output does not know them.
        name: the log's name in references.

    Raises:
        OSError: the file cannot be opened or belongs to another user, or no more threads can be started.
    """

    def __init__(self, path: str, space: LogSpace, console: Console | None = None, name: str = "") -> None:
        self.console = console
        self.copy: RunOutputSink | None = None
        self.writer = console.writer if console is not None else WriterThread()
        self._path = path
        self._name = name
        self._space = space
        self._fd = safe_files.open_log(path)
        self._begin = self._used = os.fstat(self._fd).st_size
        self._part, self._part_size = 0, space.limit // PARTS
        self._written = self._lost = self._lost_until = self._passed = 0

    def write(self, data: bytes) -> None:
        self.writer.call(self._write, data, size=len(data))

    def pass_on(self, text: bytes, shown: bytes, prefix: bytes) -> None:
        """Write a reference to the next bytes of the log to the console; without any, that its last line has ended.

        Args:
            shown: the text with its prefix, which is written instead if it has been lost here.
        """
        assert self.console is not None
        start, self._passed = self._passed, self._passed + len(text)

        def line() -> bytes:
            reference = self._reference(start, len(text), prefix)
            if self.copy is not None:
                self._space.call(self.copy.refer, reference, shown)
            return reference or shown

        self.console.write_line(self, line, len(shown))

    def close(self) -> None:
        """Close the log after all writes; no writes may follow."""
        self.writer.call(lambda: os.close(self._fd))
        if self.console is None:
            self.writer.end()

    def _reference(self, start: int, size: int, prefix: bytes) -> bytes:
        """Return the line of a reference; empty if some of these bytes have been lost."""
        if start < self._lost_until:
            return b""
        return LogReference(self._name, self._begin + start - self._lost, size, prefix).line()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._part_size and self._used >= self._part_size:
                self._begin_part()
            try:
                done = os.write(self._fd, view[: self._part_size - self._used] if self._part_size else view)
            except OSError:
                self._written += len(view)
                self._lost += len(view)
                self._lost_until = self._written
                return
            self._used += done
            self._written += done
            view = view[done:]
        self._space.add(self._path, len(data))

    def _begin_part(self) -> None:
        """Give the full part its number, begin another one, and drop the oldest of more than ``PARTS``."""
        aside = f"{self._path}.new"
        try:
            fd = safe_files.open_log(aside)
            os.rename(self._path, f"{self._path}.{self._part}")
            os.rename(aside, self._path)
        except OSError:  # such as a full disk: this part is the last one, without a limit
            self._part_size = 0
            return
        os.close(self._fd)
        self._fd, self._used = fd, 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._path}.{self._part - PARTS + 1}")
            self._space.say("dropped", f"log_limit: the oldest output is dropped, first from {self._path}")
        self._part += 1
