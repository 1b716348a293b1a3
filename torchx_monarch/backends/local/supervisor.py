# SPDX-License-Identifier: BSD-3-Clause
"""The process that owns one app.

    submitter ── first process ── supervisor ── replicas
                 (exits immediately)

The first process exits so that the supervisor has no parent among the submitter's processes. The supervisor is a
subreaper, so a process of the app that has lost its parent remains below it; children of ordinary programs that survive
its death are killed when the app is cancelled or deleted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import folder
from torchx_monarch.backends.local.supervision import SupervisorRecord, SupervisorRequest
from torchx_monarch.backends.local.supervisor_loop import SupervisorLoop
from torchx_monarch.insight import events
from torchx_monarch.system import processes

_LIFE_SIGN_INTERVAL = 2.0
"""Seconds between two new times of the status file, the last of which is the end of an app whose supervisor dies."""


def main(root: str, lock_descriptor: str) -> None:
    """Start the supervisor of an app, and return immediately in the first process.

    Its stdout is a pipe to the submitter, which ends when the app has been started. It holds the app's lock, whose
    descriptor it inherits, until it ends.
    """
    lock = int(lock_descriptor)
    # The supervisor reads a request to stop from disk once it handles signals. Blocked until here (``submit``).
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(lock, False)
    if os.fork():
        return
    code = 1
    try:
        _supervise(state_files.AppPaths(root))
        os.close(lock)
        with contextlib.suppress(OSError):
            folder.prune(os.path.dirname(root))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _supervise(paths: state_files.AppPaths) -> None:
    os.setsid()
    processes.become_subreaper()
    processes.raise_file_limit()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, record = SupervisorRequest.load(paths), SupervisorRecord.load(paths)
    assert request is not None and record is not None  # ``submit`` has written both
    os.makedirs(request.run_dir, mode=0o700, exist_ok=True)
    pid, loop = os.getpid(), SupervisorLoop(paths, request, record)
    folder.write_owner(paths)  # it handles SIGTERM now: one that is sent to its pid is not lost

    def show_life() -> None:
        with contextlib.suppress(OSError):  # the folder was removed
            os.utime(paths.status)
        loop.at(time.monotonic() + _LIFE_SIGN_INTERVAL, show_life)

    def on_ready() -> None:
        # The submitter may have died meanwhile; the app continues.
        with contextlib.suppress(OSError):
            os.write(1, folder.READY)
        os.dup2(2, 1)
        show_life()

    events.append(paths.events, "supervised", f"the supervisor (pid {pid}) watches over the app", pid=pid)
    loop.run(on_ready)
