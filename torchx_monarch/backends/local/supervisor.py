# SPDX-License-Identifier: BSD-3-Clause
"""The processes that own one app.

    submitter ── first process ── keeper ── supervisor ── replicas
                 (exits immediately)

The first process exits so that the keeper has no parent among the submitter's processes. The supervisor runs the app
(``supervisor_loop``). The keeper sleeps until the supervisor has ended; if that left no final status behind, the keeper
kills every process of the app and writes the status itself. Both are subreapers, so a process of the app that has lost
its parent remains below them. Both hold the app's lock (``owners``). If both are killed, the kernel kills the replicas
and releases the lock, by which readers know that the app has ended (``state``); children of ordinary programs that
survive these are killed when the app is deleted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import state, status
from torchx_monarch.backends.local.request import LocalRequest
from torchx_monarch.backends.local.request import load as load_request
from torchx_monarch.backends.local.supervisor_loop import SupervisorLoop
from torchx_monarch.insight import events
from torchx_monarch.model import job_result
from torchx_monarch.supervisor import spawn
from torchx_monarch.system import processes

#: What the supervisor writes to the submitter when the app has been started.
READY = b"ok"


def main(root: str, ready: int, lock: int) -> None:
    """Start keeper and supervisor of an app, and return immediately in the first process.

    Args:
        root: the app's folder.
        ready: the write end of a pipe; READY is written to it when the app has been started. It is closed in any case.
    """
    # The supervisor reads a request to stop from disk once it handles signals. Blocked until here (``submit``).
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(ready, False)
    os.set_inheritable(lock, False)
    _fork(lambda: _keep(state_files.AppPaths(root), ready, lock))


def _fork(run: Callable[[], None]) -> int:
    """Call a function in a child process, which exits with 0, or with 1 and a traceback; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _keep(paths: state_files.AppPaths, ready: int, lock: int) -> None:
    os.setsid()
    processes.become_subreaper()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    alive, held = os.pipe()
    keeper = os.getpid()
    request = load_request(paths)
    if request is None:
        raise FileNotFoundError(paths.request)

    def supervise() -> None:
        os.close(held)
        _supervise(paths, request, keeper, alive, ready)

    supervisor = _fork(supervise)
    os.close(alive)
    os.close(ready)
    while True:
        pid, result = os.waitpid(-1, 0)
        if pid == supervisor:
            break
    processes.kill_descendants(request.job)
    record = status.load(paths)
    if record is not None and not record.terminal:
        code = os.waitstatus_to_exitcode(result)
        processes.kill_until_gone(lambda: processes.marked(request.job))
        reason = f"the supervisor (pid {supervisor}) {job_result.describe_code(code)}"
        if code >= 0:
            reason += f"; see {paths.supervisor_log}"
        state.mark_dead(paths, record, request, reason)
    os.close(lock)
    with contextlib.suppress(OSError):
        from torchx_monarch.backends.local.folder import prune

        prune(os.path.dirname(paths.root))


def _supervise(paths: state_files.AppPaths, request: LocalRequest, keeper: int, alive: int, ready: int) -> None:
    os.setsid()
    processes.become_subreaper()
    spawn.raise_file_limit()
    record = status.load(paths)
    mine, keeper_identity = processes.identity(os.getpid()), processes.identity(keeper)
    if record is None or mine is None or keeper_identity is None:
        raise RuntimeError(f"{paths.status} is missing, or the keeper has died")
    if record.terminal:
        raise RuntimeError(f"the app has ended before it was started: {record.msg}")
    os.makedirs(request.run_dir, mode=0o700, exist_ok=True)
    owning = state.Owners(os.uname().nodename, keeper=keeper_identity, supervisor=mine)
    state_files.write_json(paths.supervisor, owning.to_json())

    def on_ready() -> None:
        # The submitter may have died meanwhile; the app continues.
        with contextlib.suppress(OSError):
            os.write(ready, READY)
        os.close(ready)

    events.append(paths.events, "supervised", f"the supervisor (pid {mine.pid}) watches over the app", pid=mine.pid)
    SupervisorLoop(paths, request, record).run(on_ready, alive)
    processes.send(keeper_identity, signal.SIGCONT)  # a stopped keeper would never exit
