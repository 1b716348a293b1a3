# SPDX-License-Identifier: BSD-3-Clause
"""Submit an app: write its folder, start its supervisor, and wait until that runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torchx_monarch.backends import entrypoint
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import StateDirError, SubmitError, SubmittedAlreadyError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.local import folder
from torchx_monarch.backends.local.supervision import SupervisorRecord, SupervisorRequest
from torchx_monarch.insight import events
from torchx_monarch.model.env_names import JOB_VARIABLES
from torchx_monarch.model.state import State
from torchx_monarch.system import processes, run_dirs, safe_files

#: Seconds in which a supervisor must report that it runs; it takes a few hundredths of one.
_START_TIMEOUT = 60.0


def submit(
    request: SupervisorRequest, app: Mapping[str, Any], fill: Callable[[str], None] = lambda folder: None
) -> str:
    """Start the supervisor of a request; return the app's id when the supervisor runs independently of this process.

    Args:
        app: the app as submitted (``SubmittedApp.to_json``), stored for ``describe``.
        fill: writes further files into the app's folder.

    Raises:
        SubmittedAlreadyError: the request was submitted already.
        SubmitError: the folder could not be written, or the supervisor could not be started.
    """
    created = time.time()
    try:
        request, lock = _make_folder(request, app, fill, created)
    except OSError as error:
        raise StateDirError(error, state_files.apps_dir()) from error
    paths = state_files.app_paths(request.app_id)
    events.append(paths.events, "submitted", f"submitted as {request.app_id}", seconds=time.time() - created)
    try:
        start_supervisor(paths, request, lock)
    except Exception as e:
        processes.kill_until_gone(lambda: processes.marked(request.job))
        folder.remove_run_dir(paths, request.run_dir)
        folder.remove_app(paths)
        if isinstance(e, OSError):
            reason = f"{e}{processes.limit_hint(e)}"
            raise SubmitError(f"the supervisor of {request.app_id} could not be started: {reason}") from e
        raise
    except BaseException:
        # Ctrl-C: the caller never gets the app's id, so the app must not continue.
        folder.request_stop(paths, Outcome(State.CANCELLED), 0.0)
        raise
    finally:
        os.close(lock)
    return request.app_id


def _make_folder(
    request: SupervisorRequest, app: Mapping[str, Any], fill: Callable[[str], None], created: float
) -> tuple[SupervisorRequest, int]:
    """Make the app's folder; return the request as written there, and the descriptor of the app's lock."""
    state_files.make_folder("apps")
    paths = state_files.app_paths(request.app_id)
    try:
        os.mkdir(paths.root, 0o700)
    except FileExistsError:
        raise SubmittedAlreadyError(request.app_id) from None
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove_app, paths)
        lock = folder.lock(paths)
        undo.callback(os.close, lock)
        is_short = len(os.fsencode(paths.run)) <= run_dirs.MAX_RUN_DIR
        run_dir = paths.run if is_short else run_dirs.new_run_dir()
        undo.callback(folder.remove_run_dir, paths, run_dir)
        request = replace(request, run_dir=run_dir, job=f"{request.app_id}:{secrets.token_hex(8)}")
        record = SupervisorRecord.new(request, created, os.uname().nodename)
        os.mkdir(paths.logs, 0o700)
        for role in record.roles:
            os.mkdir(os.path.dirname(paths.replica_logs(role.name, 0)), 0o700)
            for replica in role.replicas:
                os.mkdir(paths.replica_logs(role.name, replica.id), 0o700)
        fill(paths.root)
        state_files.write_json(paths.app, {"created": created, **app})
        state_files.write_json(paths.request, asdict(request))
        safe_files.make_reserve(paths.reserve, record.reserve_bytes)
        state_files.write_json(paths.status, asdict(record))  # from here on the app exists
        undo.pop_all()
    return request, lock


def start_supervisor(paths: state_files.AppPaths, request: SupervisorRequest, lock: int) -> None:
    """Start the supervisor of an app, which inherits the descriptor of its lock, and wait until it runs."""
    # An app may be submitted from inside a replica of another app, which these variables describe.
    environ = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    environ[processes.MARKER] = request.job
    with open(paths.supervisor_log, "ab", opener=safe_files.open_file) as log, _blocked(signal.SIGTERM):
        first = subprocess.Popen(
            [sys.executable, "-I", "-S", entrypoint.__file__, "local.supervisor", paths.root, str(lock)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environ,
            cwd="/",
            start_new_session=True,
            pass_fds=(lock,),
        )
    answer = b""
    with first:
        try:
            answer, _ = first.communicate(timeout=_START_TIMEOUT)  # ends when the supervisor has closed its stdout
        except subprocess.TimeoutExpired:
            first.kill()
    if answer != folder.READY:
        raise SubmitError(
            f"the supervisor of {paths.app_id} could not be started (with {sys.executable}): "
            f"{_tail(paths.supervisor_log) or 'it printed nothing'}"
        )


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal in this thread: ``folder.request_stop`` may signal a supervisor that is about to ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tail(path: str, size: int = 4000) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - size))
        return file.read().decode(errors="replace").strip()
    return ""
