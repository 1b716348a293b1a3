# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Determine the current state of an app: its status file, checked against the processes that it names."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import cancel_request, folder, owners, status
from torchx_monarch.backends.local.cancel_request import CancelRequest
from torchx_monarch.backends.local.request import LocalRequest
from torchx_monarch.backends.local.request import load as load_request
from torchx_monarch.insight import events
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import log_writer
from torchx_monarch.system import processes

#: Maximum seconds from the creation of an app's folder until its supervisor has written supervisor.json.
_START_TIME = 60.0

_ENDING_TIME = 5.0
"""Maximum seconds that keeper and supervisor of an ended app have to end by themselves."""

_EXIT_TIME = 60.0
"""Maximum seconds that a supervisor on a busy machine has to exit after it has recorded the app's end."""

SUPERVISE_FILE = os.path.join("backends", "local", "supervise.py")
"""The end of the path of the script that keeper and supervisor run."""


def load_owners(paths: state_files.AppPaths) -> owners.Owners | None:
    """Read which processes own the app; return None if the supervisor has not started yet, or the file is damaged."""
    try:
        return state_files.load(owners.Owners, paths.supervisor, paths.trusted)
    except state_files.DamagedFileError:
        return None


def request_stop(paths: state_files.AppPaths, grace: float | None) -> None:
    """Ask the app's supervisor to end the app; a supervisor that is still starting reads the request from disk.

    Args:
        paths: paths of the app.
        grace: seconds from SIGTERM to SIGKILL; None for the app's own run option.

    Raises:
        OSError: no supervisor runs and the request could not be written, or the supervisor belongs to another user.
    """
    unwritten: OSError | None = None
    try:
        cancel_request.write(paths, CancelRequest(grace))
    except OSError as error:  # a full disk, or a folder of that name: a running supervisor ends the app nevertheless
        unwritten = error
    found = supervisors(paths)
    for each in found:
        processes.send(each, signal.SIGTERM)
        processes.send(each, signal.SIGCONT)  # a stopped process handles SIGTERM only after it
    if unwritten is not None and not found:
        raise unwritten


def supervisors(paths: state_files.AppPaths) -> list[processes.ProcessIdentity]:
    """Return the app's supervisor if it is alive on this machine: as recorded, else as its command line shows.

    A command line may also be the keeper's, which ignores the signals that a supervisor handles.
    """
    watching = load_owners(paths)
    if watching is not None and watching.life(watching.supervisor) is owners.ProcessStatus.ALIVE:
        return [watching.supervisor]
    real = os.path.realpath(paths.root)
    return [one for one, root in processes.running_script(SUPERVISE_FILE) if os.path.realpath(root) == real]


def runs_on(paths: state_files.AppPaths, record: status.AppRecord) -> bool:
    """Return whether the app's supervisor is alive although the app's record says that the app has ended.

    A supervisor that has recorded the end a moment ago is about to exit, and does not count.
    """
    if record.ended is not None and abs(time.time() - record.ended) < _EXIT_TIME:
        return False
    watching = load_owners(paths)
    if watching is None:
        return os.path.lexists(paths.supervisor) and bool(supervisors(paths))
    return watching.life(watching.supervisor) is owners.ProcessStatus.ALIVE


def remove_ended(paths: state_files.AppPaths) -> None:
    """Wait until keeper and supervisor of an ended app are gone, kill what is left, and remove the app's folder.

    An app whose folder is gone counts as running while its keeper does (see ``orphaned_record``).
    """
    with contextlib.suppress(state_files.DamagedFileError):
        request = load_request(paths)
        if request is not None and request.job:
            until = time.monotonic() + _ENDING_TIME
            while processes.marked(request.job) and time.monotonic() < until:
                time.sleep(0.02)
            processes.kill_until_gone(lambda: processes.marked(request.job))
    folder.remove_app(paths)


def removed_but_running(apps: str) -> list[str]:
    """Return the ids of apps whose folder was removed while their supervisor still runs on this machine.

    A supervisor ends such an app within seconds, unless it is stopped (SIGSTOP).

    Args:
        apps: the folder of all apps.
    """
    roots = {root for _, root in processes.running_script(SUPERVISE_FILE) if not os.path.lexists(root)}
    real = os.path.realpath(apps)
    return sorted(os.path.basename(root) for root in roots if os.path.realpath(os.path.dirname(root)) == real)


def orphaned_record(paths: state_files.AppPaths) -> status.AppRecord | None:
    """Return a record of an app whose folder, or the status in it, was removed; None if the app does not run."""
    if not supervisors(paths):
        return None
    message = f"its folder {paths.root} was removed, so it ends within seconds; torchx cancel ends it now"
    return status.AppRecord(paths.app_id, paths.app_id.rpartition("-")[0], time.time(), State.RUNNING, message)


def recorded(paths: state_files.AppPaths) -> status.AppRecord | None:
    """Return the state of an app as last written: cheaper than ``current_state``, right while its supervisor runs."""
    try:
        return status.load(paths)
    except state_files.DamagedFileError:
        return current_state(paths)


def current_state(paths: state_files.AppPaths) -> status.AppRecord | None:
    """Return the current state of an app; None if the app does not exist.

    An app whose keeper and supervisor are dead has ended, whatever its status file says. The first process that detects
    this kills what is left of the app and records its end. An app whose supervisor lives runs, whatever its status file
    says. If the status file is damaged, the state follows from the processes. Nothing is written in these two cases.
    """
    try:
        record = status.load(paths)
    except state_files.DamagedFileError as error:
        return _without_status(paths, str(error))
    if record is None:
        return orphaned_record(paths)  # `rm -r` may leave what the job writes meanwhile
    if record.terminal:
        if runs_on(paths, record):
            record.msg = f"{paths.status} says {record.state}, but the app runs: its supervisor is there"
            record.state, record.ended = State.RUNNING, None
        return record
    watching = load_owners(paths)
    if watching is None:
        if time.time() - record.created < _START_TIME or supervisors(paths):
            return record
        if os.path.lexists(paths.supervisor):
            record.state = State.FAILED
            record.msg = f"{paths.supervisor} is damaged, and no supervisor of the app runs here"
            return record
        reason = "it was never started: its submission was interrupted"
    else:
        life = watching.life(watching.supervisor)
        if life is owners.ProcessStatus.ALIVE:
            return record
        if watching.life(watching.keeper) is owners.ProcessStatus.ALIVE:
            # The keeper is recording the end; if it is stopped, it does so after SIGCONT.
            processes.send(watching.keeper, signal.SIGCONT)
            return record
        if supervisors(paths):  # supervisor.json names other processes
            return record
        if life is owners.ProcessStatus.ELSEWHERE:
            record.msg = f"as last written by {watching.machine.hostname}, which cannot be checked from here"
            return record
        # The supervisor may have recorded the end and exited between the two checks.
        try:
            record = status.load(paths)
        except state_files.DamagedFileError as error:
            return _without_status(paths, str(error))
        if record is None or record.terminal:
            return record
        if life is owners.ProcessStatus.REBOOTED:
            reason = "the machine was rebooted while the app ran"
        else:
            reason = (
                f"the supervisor (pid {watching.supervisor.pid}) and the keeper (pid {watching.keeper.pid}) were killed"
            )
    return _mark_dead_once(paths, reason)


def _without_status(paths: state_files.AppPaths, damage: str) -> status.AppRecord | None:
    """Return a record of an app whose status file is damaged: its request, and whether it runs."""
    try:
        created = os.stat(paths.root, follow_symlinks=False).st_mtime
    except OSError:
        return None
    record = status.AppRecord(paths.app_id, paths.app_id.rpartition("-")[0], created)
    with contextlib.suppress(state_files.DamagedFileError):
        if request := load_request(paths):
            record.name = request.name
            record.roles = status.new_roles(request)
    if supervisors(paths):
        record.state, record.msg = State.RUNNING, f"{damage}. The app runs: its supervisor is there"
    else:
        record.state, record.msg = State.FAILED, f"how it ended is lost: {damage}"
    for role in record.roles:
        for replica in role.replicas:
            replica.state = record.state
    return record


def _mark_dead_once(paths: state_files.AppPaths, reason: str) -> status.AppRecord | None:
    """Call ``mark_dead`` in only one of the processes that detect the end at the same time; return the final record."""
    try:
        fd = os.open(paths.root, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # removed meanwhile
        return None
    try:
        with contextlib.suppress(OSError):  # without file locks, two processes may record the end
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            record = status.load(paths)
        except state_files.DamagedFileError as error:
            return _without_status(paths, str(error))
        if record is None or record.terminal:
            return record
        request = None
        with contextlib.suppress(state_files.DamagedFileError):
            request = load_request(paths)
        if request is not None and request.job:
            processes.kill_until_gone(lambda: processes.marked(request.job))
        mark_dead(paths, record, request, reason)
        return record
    finally:
        os.close(fd)


def mark_dead(paths: state_files.AppPaths, record: status.AppRecord, request: LocalRequest | None, reason: str) -> None:
    """Record that an app has ended without its supervisor: in its status, its events and its logs."""
    for role in record.roles:
        for replica in role.replicas:
            if not replica.state.is_terminal:
                logs = log_writer.ReplicaLogs(paths.replica_logs(role.name, replica.id), paths.trusted)
                logs.say(reason)
                logs.close()
    if request is not None:
        folder.remove_run_dir(paths, request.run_dir)
    events.append(paths.events, "ended", f"FAILED: {reason}")
    # On a read-only or full disk, each later query determines the state again.
    with contextlib.suppress(OSError):
        status.close_for_dead(paths, record, reason)
