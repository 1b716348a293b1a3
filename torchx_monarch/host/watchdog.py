# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torchelastic's watchdog: ranks set timers (``torch.distributed.elastic.timer``), and who lets one expire is killed.

Under torchrun the server of these timers is a thread of the launcher. It needs torch, so here it is a process of its
own (``timer_main``). As under torchrun it is there only when the role's environment asks for it, by
``TORCHELASTIC_ENABLE_FILE_TIMER=1``.
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
"""Seconds that it may take to import torch."""


class WatchdogError(Exception):
    """The timer server does not run; the message says why."""


class Watchdog:
    """Starts the server; to be used from the main thread alone, as ``RankProcess`` is.

    Attributes:
        path: of the named pipe on which ranks send their timers.

    Args:
        python: the interpreter with its flags.
        path: the named pipe is made there; what is there is removed.
        run_id: TORCHELASTIC_RUN_ID, for torch's own log of expired timers.
        env: the environment.
        tell: takes a line for a person: a timer that expired, or that nobody looks at timers any more.

    Raises:
        OSError: it cannot be started.
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
        """The server's process."""
        return self._process.pid

    async def ready(self) -> None:
        """Returns when the ranks of an attempt can set timers; those of the one before are forgotten.

        Raises:
            WatchdogError: they cannot.
        """
        self._expired.clear()
        try:
            await asyncio.wait_for(self._ready.wait(), _READY_TIMEOUT)
        except asyncio.TimeoutError:
            raise WatchdogError(f"it has not begun within {_READY_TIMEOUT:g} s") from None
        if self._error:
            raise WatchdogError(self._error)

    def timer_of(self, pid: int) -> str:
        """The scope of the timer for which a process was signalled; empty for none."""
        return self._expired.get(pid, "")

    def close(self) -> None:
        """End the server and remove its pipe."""
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
            self._heard(json.loads(line))

    def _heard(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "expired":
            pid, scope = message["pid"], message["scope"]
            self._expired[pid] = scope
            self._tell(f"timer {scope!r} of process {pid} expired: it gets signal {message['signal']}")
            return
        self._error = message.get("text", "")
        self._ready.set()
