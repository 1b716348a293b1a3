# SPDX-License-Identifier: BSD-3-Clause
"""Start torchelastic's watchdog: it kills a rank that lets a timer of ``torch.distributed.elastic.timer`` expire.

Under torchrun a thread of the launcher serves these timers. The server needs torch, so here it is a separate process
(``timer_main``). As under torchrun, it runs only when the role's environment has ``TORCHELASTIC_ENABLE_FILE_TIMER=1``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"

_TIMER_MAIN = str(Path(__file__).with_name("timer_main.py"))

_READY_TIMEOUT = 120.0
"""Seconds within which the server must be ready; it imports torch first."""


class WatchdogError(Exception):
    """Raised when the timer server does not run; the message gives the reason."""


class Watchdog:
    """Start and control the process of the timer server; use from the main thread only, like ``RankProcess``.

    Attributes:
        path: path of the named pipe on which ranks send their timers.

    Args:
        python: the interpreter and its flags.
        path: path at which the server makes the named pipe; an existing file there is removed.
        run_id: TORCHELASTIC_RUN_ID, for torch's log of expired timers.
        env: environment of the server.
        tell: called with a progress line when a timer expires or the server has ended.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, python: Sequence[str], path: str, run_id: str, env: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self.path = path
        self._tell = tell
        self._expired: dict[int, str] = {}
        self._ready = asyncio.Event()
        self._error = ""
        self._partial = b""
        self._process = subprocess.Popen(
            [*python, _TIMER_MAIN, str(os.getpid()), path, run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=env,
        )
        assert self._process.stdout is not None
        asyncio.get_running_loop().add_reader(self._process.stdout, self._readable)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    async def ready(self) -> None:
        """Wait until ranks can set timers; forget the expired timers of the previous attempt.

        Raises:
            WatchdogError: the server has failed, has ended, or is not ready within ``_READY_TIMEOUT`` seconds.
        """
        self._expired.clear()
        try:
            await asyncio.wait_for(self._ready.wait(), _READY_TIMEOUT)
        except asyncio.TimeoutError:
            raise WatchdogError(f"it has not begun within {_READY_TIMEOUT:g} s") from None
        if self._error:
            raise WatchdogError(self._error)

    def timer_of(self, pid: int) -> str:
        """Return the scope of the timer for which a process was signalled; empty if none expired."""
        return self._expired.get(pid, "")

    def close(self) -> None:
        """Kill the server and remove its named pipe."""
        if self._process.stdout is not None and not self._process.stdout.closed:
            asyncio.get_running_loop().remove_reader(self._process.stdout)
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                end.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _readable(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            asyncio.get_running_loop().remove_reader(self._process.stdout)
            self._error = self._error or "its process has ended"
            self._tell(f"timers ({FILE}) are not looked at any more: {self._error}")
            self._ready.set()
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._handle_message(json.loads(line))

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "expired":
            pid, scope = message["pid"], message["scope"]
            self._expired[pid] = scope
            self._tell(f"timer {scope!r} of process {pid} expired: it gets signal {message['signal']}")
            return
        self._error = message.get("text", "")
        self._ready.set()
