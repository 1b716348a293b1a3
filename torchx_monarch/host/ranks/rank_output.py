# SPDX-License-Identifier: BSD-3-Clause
"""The output of ranks and commands: byte for byte to a log file, and in whole lines, which may have a prefix, to the
host's output and further destinations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from torchx_monarch.system.console import Console
from torchx_monarch.system.line_output import LONGEST, complete
from torchx_monarch.system.log_references import prefixed

if TYPE_CHECKING:
    from torchx_monarch.host.ranks.rank_logs import FilteredFile, RankLog
    from torchx_monarch.host.ranks.run_output import RunOutput, RunOutputSink
    from torchx_monarch.system.console import WriterThread

_CHUNK = 1 << 16
"""Bytes read at a time, the capacity of a pipe. The memory of a larger buffer is mapped anew for each read: with 256 kB
the host took 1.4 s of system time for each GiB, and takes 0.6 s."""

_MAX_PIPE = 1 << 20
"""The most bytes in a pipe (``/proc/sys/fs/pipe-max-size``)."""

_LINES = re.compile(rb"[^\n]*\n|[^\n]+")

_DRAW_AFTER = 0.1
"""Seconds after which an unfinished progress bar is shown: tqdm's default interval between two updates."""

_READS = 20
"""Reads in a second after which pieces of less than ``_SHORT`` bytes are gathered."""

_SHORT = 4096

_PAUSES = 0.004, 0.05
"""The shortest and the longest time in seconds for which they are: a fast rank must not fill its pipe meanwhile."""

_LAST = 1 << 14
"""Bytes at the end of the output that are kept for ``OutputPipe.last_line``: the C++ stack of an error of torch's has
half as many."""

_FRAME = re.compile(
    rb'frame #\d+: |Exception raised from |File "(<frozen |%s/)' % re.escape(os.fsencode(os.path.dirname(__file__)))
)
"""The begin of a line of a C++ stack, as torch has it in the messages of errors, and of a Python frame below the
program's."""


class OutputPipe:
    """Read one pipe to its end, from ``release`` on, so that progress lines of the host can precede its output.

    Memory is bounded: a line longer than ``LONGEST`` bytes is passed on in pieces, and while a destination takes no
    more, the pipe is not read, so that the rank waits when it is full.

    Attributes:
        ended: set when the pipe has been closed.
        last_at: when output arrived last, in seconds since the epoch; 0 for never.

    Args:
        on_first: called once, before the first bytes are passed on; None for no call.
        is_shown: returns whether to write a line, given without its line feed, to the host's output; None to write all.
        ends_lines: whether a last line without a line feed gets one.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        on_first: Callable[[], None] | None,
        is_shown: Callable[[bytes], bool] | None = None,
        *,
        ends_lines: bool = True,
    ) -> None:
        self.ended = asyncio.Event()
        self.last_at = 0.0
        self._last = b""
        self._pipe = pipe
        self._on_first = on_first
        self._is_shown = is_shown
        self._ends_lines = ends_lines
        self._is_released = False
        self._log: RankLog | None = None
        self._writers: list[WriterThread | RunOutput] = []
        self._console: Console | None = None
        self._sinks: Sequence[FilteredFile | RunOutputSink] = ()
        self._prefix = b""
        self._partial = bytearray()
        self._goes_on = False
        """Whether the next text to show continues a line of which pieces have been shown."""
        self._drawing: asyncio.TimerHandle | None = None
        self._second, self._reads, self._pause = 0.0, 0, _PAUSES[0]
        os.set_blocking(pipe.fileno(), False)

    def assign(
        self,
        log: RankLog | None,
        console: Console | None,
        prefix: str,
        sinks: Sequence[FilteredFile | RunOutputSink] = (),
    ) -> None:
        """Set the destinations, before ``release``: the rank's log, and the host's output.

        ``sinks`` get what ``console`` gets. All but ``console`` are closed at the end.
        """
        if log is not None:
            self._log = log
            self._writers.append(log.writer)
        if console is not None:
            self._writers += [console.writer, *(writer for sink in sinks for writer in sink.writers)]
        self._console = console
        self._prefix = prefix.encode()
        self._sinks = sinks

    @property
    def last_line(self) -> bytes:
        """The end of the last line that is not empty; a progress bar counts as lines, one for each update.

        Frames that are not the program's do not count.
        """
        lines = map(bytes.strip, reversed(self._last.replace(b"\r", b"\n").split(b"\n")))
        return next((line for line in lines if line and not _FRAME.match(line)), b"")

    def release(self) -> None:
        """Begin to read, when the destinations are set; later calls do nothing."""
        if not self._is_released:
            self._is_released = True
            asyncio.get_running_loop().add_reader(self._pipe, self._readable)

    def close(self) -> None:
        """Pass on what is in the pipe and close it, even if a process still has the write end."""
        if self.ended.is_set():
            return
        with contextlib.suppress(BlockingIOError):
            if data := os.read(self._pipe.fileno(), _MAX_PIPE):
                self._arrived(data)
        asyncio.get_running_loop().remove_reader(self._pipe)
        self._pipe.close()
        self.ended.set()
        self._finish()

    def _finish(self) -> None:
        if self._console is not None and self._partial:
            self._show(bytes(self._partial))
        if self._console is not None and self._goes_on and self._ends_lines:
            if self._log is not None and self._log.console is not None:
                self._log.pass_on(b"", self._prefix, goes_on=True)
            else:
                self._console.end(self)
            for sink in self._sinks:
                sink.write(b"\n", b"\n")
        if self._drawing is not None:
            self._drawing.cancel()
        for sink in self._sinks:
            sink.close()
        if self._log is not None:
            self._log.close()

    def _readable(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self._arrived(data)
        if not self._has_room():
            asyncio.get_running_loop().remove_reader(self._pipe)
        else:
            self._gather(len(data))

    def _gather(self, size: int) -> None:
        """Read the pipe a moment later if the rank writes many short pieces."""
        if self.last_at > self._second + 1.0:
            self._second, self._reads = self.last_at, 0
        self._reads += 1
        if size >= _SHORT:
            self._pause = _PAUSES[0]
        elif self._reads > _READS:
            asyncio.get_running_loop().remove_reader(self._pipe)
            asyncio.get_running_loop().call_later(self._pause, self._resume)
            self._pause = min(2 * self._pause, _PAUSES[1])

    def _has_room(self) -> bool:
        """Return whether all destinations take more output; if not, the pipe is read again when they do."""
        loop = asyncio.get_running_loop()

        def resume() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._resume)

        return all(writer.has_room(resume) for writer in self._writers)

    def _resume(self) -> None:
        if not self.ended.is_set() and self._has_room():
            asyncio.get_running_loop().add_reader(self._pipe, self._readable)

    def _arrived(self, data: bytes) -> None:
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        self.last_at = time.time()
        self._last = (self._last + data[-_LAST:])[-_LAST:]
        if self._log is not None:
            self._log.write(data)  # a full disk loses log lines, never the job
        if self._console is None:
            return
        self._partial += data
        if b"\n" in data:
            self._show_partial(self._partial.rfind(b"\n") + 1)
        if len(self._partial) > LONGEST:
            self._show_partial(complete(self._partial))
        elif self._drawing is None and b"\r" in data and b"\r" in self._partial:
            self._drawing = asyncio.get_running_loop().call_later(_DRAW_AFTER, self._draw)

    def _draw(self) -> None:
        self._drawing = None
        self._show_partial(complete(self._partial))

    def _show_partial(self, end: int) -> None:
        text = bytes(self._partial[:end])
        del self._partial[:end]
        if text:
            self._show(text)

    def _show(self, text: bytes) -> None:
        """Write whole lines, each with its line feed, or a piece of a line, to the console and the sink."""
        assert self._console is not None
        if self._is_shown is not None:
            text = b"".join(line for line in _LINES.findall(text) if self._is_shown(line.removesuffix(b"\n")))
            if not text:
                return
        if self._log is not None and self._log.console is not None:
            self._log.pass_on(text, self._prefix, self._goes_on)
        else:
            self._console.write(self, prefixed(text, self._prefix, self._goes_on), self._prefix)
        for sink in self._sinks:
            sink.write(text, prefixed(text, self._prefix, self._goes_on))
        self._goes_on = not text.endswith(b"\n")
