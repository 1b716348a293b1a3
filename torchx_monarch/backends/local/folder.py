# SPDX-License-Identifier: BSD-3-Clause
"""The folder of an app: its current state, by status file and lock of its supervisor; the app's end and removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from dataclasses import asdict, dataclass

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.local.supervision import SupervisorRecord, SupervisorRequest
from torchx_monarch.model.state import State
from torchx_monarch.system import processes, run_dirs, safe_files
from torchx_monarch.system.processes import ProcessIdentity

_ENDING_TIME = 5.0
"""Maximum seconds that the supervisor of an ended app has to end by itself."""

TRASH_PREFIX = ".trash-"

READY = b"ok"
"""What a supervisor writes to its submitter when the app has been started."""


def request_stop(paths: state_files.AppPaths, outcome: Outcome, grace: float | None) -> None:
    """Ask the app's supervisor to end the app; without a supervisor, kill what is left of the app here.

    A supervisor that is still starting, or that runs where it cannot be signalled from here, reads the request from
    disk.

    Raises:
        OSError: the request could not be written, and no supervisor can be signalled.
    """
    owner = load_owner(paths)
    runs_here = owner is not None and processes.identity(owner.supervisor.pid) == owner.supervisor
    try:
        paths.write_stop(outcome, grace)
    except OSError:  # a full disk, or a folder of that name: a supervisor of this machine ends the app nevertheless
        if not runs_here and is_supervised(paths):
            raise
    if owner is not None and runs_here:
        processes.send(owner.supervisor, signal.SIGTERM)
        processes.send(owner.supervisor, signal.SIGCONT)  # a stopped process handles SIGTERM only after it
    if not is_supervised(paths):
        processes.kill_until_gone(lambda: left(paths))


def left(paths: state_files.AppPaths) -> list[int]:
    """Return the processes of an app that run here, by the app's marker in their environments."""
    with contextlib.suppress(state_files.DamagedFileError):
        request = SupervisorRequest.load(paths)
        if request is not None and request.job:
            return processes.marked(request.job)
    return []


def remove_ended(paths: state_files.AppPaths) -> None:
    """Wait until the supervisor of an ended app is gone, kill what has survived it, and remove the app's folders."""
    until = time.monotonic() + _ENDING_TIME
    while left(paths) and time.monotonic() < until:
        time.sleep(0.02)
    processes.kill_until_gone(lambda: left(paths))
    with contextlib.suppress(state_files.DamagedFileError):
        if request := SupervisorRequest.load(paths):
            remove_run_dir(paths, request.run_dir)
    remove_app(paths)


def current_state(paths: state_files.AppPaths) -> SupervisorRecord | None:
    """Return the current state of an app; None if the app does not exist. Nothing is written and nobody signalled.

    An app whose lock nobody holds has ended, whatever its status file says, unless it runs on another machine whose
    locks this one may not see.
    """
    alive = is_supervised(paths)  # before the status: the supervisor writes that last
    record = SupervisorRecord.load(paths)
    if record is None or record.terminal:
        return record
    owner = load_owner(paths)
    if owner is not None and not owner.is_here:
        record.msg = f"runs on {owner.hostname}" + ("" if alive else ", or has ended: that cannot be seen from here")
    elif not alive:
        reason, last_written = "its submission was interrupted before it started", 0.0
        with contextlib.suppress(OSError):  # its last sign of life (``supervisor``)
            last_written = os.stat(paths.status, follow_symlinks=False).st_mtime
        if owner is not None:
            why = f"it was killed, or {owner.hostname} was rebooted"
            with contextlib.suppress(OSError):
                why = f"see {paths.supervisor_log}" if os.path.getsize(paths.supervisor_log) else why
            reason = f"the supervisor (pid {owner.supervisor.pid}) has ended without a result: {why}"
        for replica in (replica for role in record.roles for replica in role.replicas if not replica.state.is_terminal):
            replica.state, replica.ended = State.FAILED, last_written
        record.state, record.msg, record.ended = State.FAILED, reason, last_written
    return record


@dataclass(frozen=True)
class Owner:
    """The content of supervisor.json: the process that runs an app, and the name of its machine or container."""

    hostname: str
    supervisor: ProcessIdentity

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine, by its name. On another one it may live though its lock is not seen."""
        return self.hostname == os.uname().nodename


def write_owner(paths: state_files.AppPaths) -> None:
    identity = processes.identity(os.getpid())
    assert identity is not None
    state_files.write_json(paths.supervisor, asdict(Owner(os.uname().nodename, identity)))


def load_owner(paths: state_files.AppPaths) -> Owner | None:
    """Read which process runs the app; return None if it has not started yet, or the file is damaged."""
    return state_files.load_undamaged(Owner, paths.supervisor, paths.trusted)


def lock(paths: state_files.AppPaths) -> int:
    """Make and lock the lock file of a new app; return its descriptor.

    Raises:
        OSError: the file system has no locks, or the file cannot be made.
    """
    opened = safe_files.open_file(paths.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    # Where stderr is closed, the lock would have its number, which is another file in the supervisor.
    descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(opened)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # a reader may hold it for an instant (``is_supervised``)
    except OSError as error:
        os.close(descriptor)
        reason = f"its file system has no file locks ({os.strerror(error.errno or errno.ENOLCK)})"
        raise OSError(error.errno, reason, os.path.dirname(paths.root)) from None
    return descriptor


def is_supervised(paths: state_files.AppPaths) -> bool:
    """Return whether a supervisor holds the lock of an app, here or on a machine whose locks can be seen from here."""
    try:
        descriptor = safe_files.open_file(paths.lock, below=paths.trusted)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_app(paths: state_files.SupervisorPaths) -> None:
    """Remove an app's folder with its content; other processes see all of it or nothing."""
    trash = os.path.join(os.path.dirname(paths.root), f"{TRASH_PREFIX}{os.getpid()}-{os.path.basename(paths.root)}")
    try:
        os.rename(paths.root, trash)
    except FileNotFoundError:
        return
    run_dirs.remove_tree(trash)


def remove_run_dir(paths: state_files.SupervisorPaths, run_dir: str) -> None:
    """Remove an app's folder for sockets (``submit``); leave any other folder alone."""
    if run_dir == paths.run or os.path.basename(run_dir).startswith(run_dirs.RUN_PREFIX):
        run_dirs.remove_tree(run_dir)
    run_dirs.remove_left_memory()  # of hosts that were killed


def describe_full_disk(paths: state_files.SupervisorPaths) -> str:
    """Describe a full state directory, for which files that name the cause may be missing; empty if it has room."""
    with contextlib.suppress(OSError):
        found = os.statvfs(paths.root)
        if found.f_blocks and not found.f_bavail:
            return f"the disk of {paths.root} is full, so details may be missing"
        if found.f_files and not found.f_favail:
            return f"the file system of {paths.root} has no inodes left, so details may be missing"
    return ""


def prune(apps: str) -> list[str]:
    """Remove apps that ended long ago, and folders half removed; return the ids of the removed apps."""
    now, removed = time.time(), list[str]()
    oldest = now - state_files.keep_days() * 86400
    for name in sorted(os.listdir(apps)):
        paths = state_files.AppPaths(os.path.join(apps, name))
        with contextlib.suppress(state_files.DamagedFileError, OSError):
            if name.startswith(TRASH_PREFIX):
                if os.stat(paths.root).st_mtime < now - 3600.0:  # else another process may still work on it
                    run_dirs.remove_tree(paths.root)
                continue
            if os.stat(paths.status).st_mtime >= oldest:  # reading all jobs of a sweep at the end of each takes long
                continue
            record = current_state(paths)
            if record is None or not record.terminal or record.ended is None or is_supervised(paths):
                continue
            if record.ended < oldest:
                remove_ended(paths)
                removed.append(name)
    return removed
