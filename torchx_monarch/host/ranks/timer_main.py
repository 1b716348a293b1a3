# SPDX-License-Identifier: BSD-3-Clause
"""Run torchelastic's timer server in a separate process, which ``Watchdog`` starts: the host must not import torch.

Run by path, as ``python -u timer_main.py PARENT_PID FIFO RUN_ID``. The process ends when its parent or its stdin ends.
It writes JSON objects to stdout, one a line: ``{"op": "ready"}`` when the named pipe exists, ``{"op": "expired", "pid",
"scope", "signal"}`` before it signals a process, or ``{"op": "error", "text"}``.
"""

from __future__ import annotations

import os
import sys

# The folder of this file must not shadow imports. With -P (or PYTHONSAFEPATH) Python does not add it.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
    del sys.path[0]

import ctypes  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
from typing import Any  # noqa: E402

_PR_SET_PDEATHSIG = 1


def _start(path: str, run_id: str, answers: int) -> Any:
    """Start torch's server with the settings of ``LocalElasticAgent._setup_local_watchdog`` of torch 2.13."""
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

    class Server(FileTimerServer):
        def _reap_worker(self, worker_pid: int, signal: int) -> bool:
            # After any other process, torch's server kills its own, which is the launcher under torchrun.
            return worker_pid == os.getpid() or bool(super()._reap_worker(worker_pid, signal))

    def tell(name: str, request: Any) -> None:
        if name == "timer expired" and request.signal > 0:
            _say(answers, op="expired", pid=request.worker_pid, scope=request.scope_id, signal=int(request.signal))

    server = Server(file_path=path, run_id=run_id, max_interval=0.1, daemon=True, log_event=tell)
    server.start()
    return server


def _say(answers: int, **message: object) -> None:
    os.write(answers, json.dumps(message).encode() + b"\n")


def main(parent: int, path: str, run_id: str) -> None:
    """Serve until stdin ends.

    Args:
        parent: process id of the host.
        path: path of the named pipe.
        run_id: TORCHELASTIC_RUN_ID, for torch's log of expired timers.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # torch may print to stdout: send that to stderr
    os.umask(0o077)
    try:
        server = _start(path, run_id, answers)
    except Exception as error:
        _say(answers, op="error", text=f"{type(error).__name__}: {error}")
        os._exit(1)
    _say(answers, op="ready")
    sys.stdin.buffer.read()
    server.stop()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
