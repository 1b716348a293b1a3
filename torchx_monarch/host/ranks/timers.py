# SPDX-License-Identifier: BSD-3-Clause
"""torchelastic's timers: the host kills a rank that lets a timer of ``torch.distributed.elastic.timer`` expire.

Ranks write them into a named pipe, as JSON lines: ``FileTimerClient`` of torch 2.13. As under torchrun, it
exists only if the role's environment has ``TORCHELASTIC_ENABLE_FILE_TIMER=1``. What a rank writes may be anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable

from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.model.codec import Seconds, decode
from torchx_monarch.system import children, processes, safe_files
from torchx_monarch.system.untrusted_text import one_line

ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"

_MAX_TIMERS = 10_000

_MAX_SCOPE = 200
"""Characters of a timer's name that are shown."""


@dataclasses.dataclass(frozen=True)
class _Timer:
    """A timer that a process sets, or releases by a negative time."""

    pid: int
    scope_id: str
    expiration_time: Seconds
    signal: int


class TimerServer:
    """Serve the timers of a run's ranks until ``close``.

    Attributes:
        path: path of the named pipe on which ranks send their timers.

    Raises:
        OSError: the pipe cannot be made.
    """

    def __init__(self, path: str, marker: str, say: Callable[[str], None]) -> None:
        self.path = path
        self._marker = marker
        self._say = say
        self._timers: dict[tuple[int, str], asyncio.TimerHandle] = {}
        self._partial = b""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        # Also to write: it is not at its end when the last client has closed it.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._pipe, self._readable)

    def clear(self) -> None:
        """Forget the timers of the previous attempt."""
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()

    def close(self) -> None:
        self.clear()
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _readable(self) -> None:
        *lines, self._partial = (self._partial + os.read(self._pipe, 1 << 16))[-(1 << 17) :].split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # no timer
                self._set(decode(_Timer, safe_files.parse_json(line)))

    def _set(self, timer: _Timer) -> None:
        key = timer.pid, timer.scope_id
        if before := self._timers.pop(key, None):
            before.cancel()
        if timer.expiration_time >= 0 and len(self._timers) < _MAX_TIMERS:
            delay = timer.expiration_time - time.time()
            self._timers[key] = asyncio.get_running_loop().call_later(delay, self._expire, timer)

    def _expire(self, timer: _Timer) -> None:
        del self._timers[timer.pid, timer.scope_id]
        if not 0 < timer.signal < signal.NSIG or timer.pid not in processes.descendants(os.getpid(), self._marker):
            return
        scope, rank = one_line(timer.scope_id)[:_MAX_SCOPE], children.owners.get(timer.pid)
        if isinstance(rank, Rank):
            rank.timer = scope
        self._say(f"timer {scope!r} of process {timer.pid} expired: it gets signal {timer.signal}")
        with contextlib.suppress(OSError):  # it has ended
            os.kill(timer.pid, timer.signal)
