# SPDX-License-Identifier: BSD-3-Clause
"""Determine the current state of an app: its status file, and whether the app's owners hold its lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import cancel_request, folder, status
from torchx_monarch.backends.local.cancel_request import CancelRequest
from torchx_monarch.backends.local.request import LocalRequest
from torchx_monarch.backends.local.request import load as load_request
from torchx_monarch.insight import events
from torchx_monarch.supervisor import log_writer
from torchx_monarch.system import processes, safe_files
from torchx_monarch.system.processes import ProcessIdentity

_ENDING_TIME = 5.0
"""Maximum seconds that keeper and supervisor of an ended app have to end by themselves."""


def request_stop(paths: state_files.AppPaths, grace: float | None) -> None:
    """Ask the app's supervisor to end the app; without a supervisor, kill what is left of the app here.

    A supervisor that is still starting, or that runs where it cannot be signalled from here, reads the request from
    disk.

    Args:
        paths: paths of the app.
        grace: seconds from SIGTERM to SIGKILL; None for the app's own run option.

    Raises:
        OSError: the request could not be written, and no supervisor can be signalled.
    """
    owning = load_owners(paths)
    found = [owning.supervisor, owning.keeper] if owning is not None else []
    found = [process for process in found if processes.identity(process.pid) == process]
    try:
        cancel_request.write(paths, CancelRequest(grace))
    except OSError:  # a full disk, or a folder of that name: a running supervisor ends the app nevertheless
        if not found:
            raise
    for process in found:  # the keeper ignores SIGTERM
        processes.send(process, signal.SIGTERM)
        processes.send(process, signal.SIGCONT)  # a stopped process handles SIGTERM only after it
    if not are_alive(paths):
        kill_rest(paths)


def left(paths: state_files.AppPaths) -> list[int]:
    """Return the processes of an app that run here, by the app's marker in their environments."""
    with contextlib.suppress(state_files.DamagedFileError):
        request = load_request(paths)
        if request is not None and request.job:
            return processes.marked(request.job)
    return []


def kill_rest(paths: state_files.AppPaths) -> None:
    """Kill what runs here of an app whose supervisor is dead: children of its replicas that have survived them."""
    processes.kill_until_gone(lambda: left(paths))


def remove_ended(paths: state_files.AppPaths) -> None:
    """Wait until keeper and supervisor of an ended app are gone, kill what is left, and remove the app's folders."""
    until = time.monotonic() + _ENDING_TIME
    while left(paths) and time.monotonic() < until:
        time.sleep(0.02)
    kill_rest(paths)
    with contextlib.suppress(state_files.DamagedFileError):
        if request := load_request(paths):
            folder.remove_run_dir(paths, request.run_dir)
    folder.remove_app(paths)


def current_state(paths: state_files.AppPaths) -> status.AppRecord | None:
    """Return the current state of an app; None if the app does not exist. Nothing is written and nobody signalled.

    An app whose lock nobody holds has ended, whatever its status file says, unless it runs on another machine whose
    locks this one may not see.

    Raises:
        DamagedFileError: the status file is damaged.
    """
    alive = are_alive(paths)  # before the status: the owners write that last
    record = status.load(paths)
    if record is None or record.terminal:
        return record
    owning = load_owners(paths)
    if owning is not None and not owning.is_here:
        record.msg = f"runs on {owning.hostname}" + ("" if alive else ", or has ended: that cannot be seen from here")
    elif not alive:
        reason = "its submission was interrupted before it started"
        if owning is not None:
            pids = f"(pid {owning.supervisor.pid}) and its keeper (pid {owning.keeper.pid})"
            reason = f"its supervisor {pids} were killed, or {owning.hostname} was rebooted"
        status.end_dead(record, reason, _last_written(paths))
    return record


def _last_written(paths: state_files.AppPaths) -> float:
    """Return when the status of an app was last written, in seconds since the epoch: its last sign of life."""
    try:
        return os.stat(paths.status, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def mark_dead(paths: state_files.AppPaths, record: status.AppRecord, request: LocalRequest, reason: str) -> None:
    """Record that an app has ended without its supervisor: in its status, its events and its logs."""
    for role in record.roles:
        for replica in role.replicas:
            if not replica.state.is_terminal:
                logs = log_writer.ReplicaLogs(paths.replica_logs(role.name, replica.id), paths.trusted)
                logs.say(reason)
                logs.close()
    folder.remove_run_dir(paths, request.run_dir)
    events.append(paths.events, "ended", f"FAILED: {reason}")
    status.end_dead(record, reason, time.time())
    # On a read-only or full disk, each later query determines the state again.
    with contextlib.suppress(OSError):
        status.save_last(paths, record)


@dataclass(frozen=True)
class Owners:
    """The content of supervisor.json: the processes that own an app.

    Attributes:
        hostname: the name of their machine or container.
        keeper: the process that records the app's end if the supervisor dies.
        supervisor: the process that runs the app.
    """

    hostname: str
    keeper: ProcessIdentity
    supervisor: ProcessIdentity

    @property
    def is_here(self) -> bool:
        """Whether they run on this machine, by its name. On another one they may live though their lock is not seen."""
        return self.hostname == os.uname().nodename

    def to_json(self) -> dict[str, Any]:
        # asdict() leaves named tuples as they are, and JSON would write them as lists.
        return {"hostname": self.hostname, "keeper": self.keeper._asdict(), "supervisor": self.supervisor._asdict()}


def load_owners(paths: state_files.AppPaths) -> Owners | None:
    """Read which processes own the app; return None if the supervisor has not started yet, or the file is damaged."""
    try:
        return state_files.load(Owners, paths.supervisor, paths.trusted)
    except state_files.DamagedFileError:
        return None


def lock(paths: state_files.AppPaths) -> int:
    """Make and lock the lock file of a new app; return its descriptor.

    Raises:
        OSError: the file system has no locks, or the file cannot be made.
    """
    opened = safe_files.open_file(paths.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    # Where stderr is closed, the lock would have its number, which is another file in the keeper.
    descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(opened)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        reason = f"its file system has no file locks ({os.strerror(error.errno or errno.ENOLCK)})"
        raise OSError(error.errno, reason, os.path.dirname(paths.root)) from None
    return descriptor


def are_alive(paths: state_files.AppPaths) -> bool:
    """Return whether a process holds the lock of an app, on this machine or on one whose locks can be seen from here.

    Raises:
        OSError: the file system does not answer.
    """
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
