# SPDX-License-Identifier: BSD-3-Clause
"""torchelastic's timers: a server kills a rank that lets a timer of ``torch.distributed.elastic.timer`` expire.

Under torchrun a thread of the launcher serves these timers. The server needs torch, which the host must not import, so
here it is a process of its own: the program's interpreter runs this file by path, as ``python -u timers.py PARENT_PID
FIFO RUN_ID``, and has the standard library alone. The process ends with its parent. It writes JSON
objects to stdout, one a line: ``{"op": "ready"}`` when the named pipe exists, ``{"op": "expired", "pid", "scope",
"signal"}`` before it signals a process, or ``{"op": "error", "text"}``. As under torchrun, it runs only when the role's
environment has ``TORCHELASTIC_ENABLE_FILE_TIMER=1``.
"""

from __future__ import annotations

import os
import sys

# The folder of this file must not shadow imports. With -P (or PYTHONSAFEPATH) Python does not add it.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
    del sys.path[0]

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"

_READY_TIMEOUT = 120.0
"""Seconds within which the server must be ready; it imports torch first."""

_PR_SET_PDEATHSIG = 1


class TimerError(Exception):
    """Raised when the timer server does not run; the message gives the reason."""


class TimerServer:
    """Start and control the process of the timer server; use from the main thread only, like ``RankProcess``.

    Attributes:
        path: path of the named pipe on which ranks send their timers.
        expired: the scopes of timers that have expired, by the pids of the processes that were signalled.
    """

    def __init__(
        self, python: Sequence[str], path: str, run_id: str, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.path = path
        self._say = say
        self.expired: dict[int, str] = {}
        self._ready = asyncio.Event()
        self._error = ""
        self._partial = b""
        self.process = subprocess.Popen(
            [*python, __file__, str(os.getpid()), path, run_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=env,
        )
        assert self.process.stdout is not None
        self._answers = self.process.stdout
        asyncio.get_running_loop().add_reader(self._answers, self._readable)

    async def ready(self) -> None:
        """Wait until ranks can set timers; forget the expired timers of the previous attempt. Raises ``TimerError``."""
        self.expired.clear()
        try:
            await asyncio.wait_for(self._ready.wait(), _READY_TIMEOUT)
        except asyncio.TimeoutError:
            raise TimerError(f"it has not begun within {_READY_TIMEOUT:g} s") from None
        if self._error:
            raise TimerError(self._error)

    def close(self) -> None:
        """Kill the server and remove its named pipe."""
        asyncio.get_running_loop().remove_reader(self._answers)
        self.process.kill()
        self.process.wait()
        self._answers.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _readable(self) -> None:
        data = os.read(self._answers.fileno(), 1 << 16)
        if not data:
            asyncio.get_running_loop().remove_reader(self._answers)
            self._error = self._error or "its process has ended"
            self._say(f"timers ({FILE}) are not looked at any more: {self._error}")
            self._ready.set()
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for message in map(json.loads, lines):
            if message["op"] == "expired":
                pid, scope = message["pid"], message["scope"]
                self.expired[pid] = scope
                self._say(f"timer {scope!r} of process {pid} expired: it gets signal {message['signal']}")
            else:
                self._error = message.get("text", "")
                self._ready.set()


# -- in the process ----------------------------------------------------------------------------------------------------


def main(parent: int, path: str, run_id: str) -> None:
    """Serve timers on a named pipe until the host, the parent, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # torch may print to stdout: send that to stderr
    os.umask(0o077)

    def answer(**message: object) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    try:
        _start(path, run_id, answer)
    except Exception as error:
        answer(op="error", text=f"{type(error).__name__}: {error}")
        os._exit(1)
    answer(op="ready")
    while True:
        signal.pause()


def _start(path: str, run_id: str, answer: Callable[..., None]) -> None:
    """Start torch's server with the settings of ``LocalElasticAgent._setup_local_watchdog`` of torch 2.13."""
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

    class Server(FileTimerServer):
        def _reap_worker(self, worker_pid: int, signal: int) -> bool:
            # After any other process, torch's server kills its own, which is the launcher under torchrun.
            return worker_pid == os.getpid() or bool(super()._reap_worker(worker_pid, signal))

    def log(name: str, request: Any) -> None:
        if name == "timer expired" and request.signal > 0:
            answer(op="expired", pid=request.worker_pid, scope=request.scope_id, signal=int(request.signal))

    Server(file_path=path, run_id=run_id, max_interval=0.1, daemon=True, log_event=log).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
