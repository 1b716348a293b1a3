# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The truth about an app: what the status file says, checked against the processes it speaks of."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time

from torchx_monarch.backends.local import folder, log_writer, owners, state_files, status
from torchx_monarch.backends.local.request import DetachedRequest
from torchx_monarch.backends.local.request import load as load_request
from torchx_monarch.insight import events
from torchx_monarch.system import processes

#: Seconds from the making of an app's folder to its supervisor's first word, at the very most.
_START_TIME = 60.0

SUPERVISE_FILE = os.path.join("backends", "local", "supervise.py")
"""Ends the path of the file that keeper and supervisor are started with."""


def watched_by(paths: state_files.AppPaths) -> owners.Owners | None:
    """Who watches over the app; None until the supervisor has started, or where the file that says so is damaged."""
    try:
        return state_files.load(owners.Owners, paths.supervisor, paths.trusted)
    except state_files.DamagedFileError:
        return None


def ask_to_end(paths: state_files.AppPaths, grace: float | None) -> None:
    """Tell the app's supervisor to end it; a supervisor that is still starting finds the wish on disk.

    Args:
        grace: seconds from SIGTERM to SIGKILL; None is the app's own run option.

    Raises:
        OSError: no supervisor runs that could be told, and the wish could not be written; or the supervisor belongs to
            another user.
    """
    unwritten: OSError | None = None
    try:
        state_files.write_json(paths.cancel, {"grace": grace})
    except OSError as error:  # a full disk, or a folder of that name: a supervisor that runs ends the app all the same
        unwritten = error
    found = supervisors(paths)
    for each in found:
        processes.send(each, signal.SIGTERM)
        processes.send(each, signal.SIGCONT)  # one that was stopped would not hear it
    if unwritten is not None and not found:
        raise unwritten


def supervisors(paths: state_files.AppPaths) -> list[processes.Identity]:
    """The app's supervisor, if it lives on this machine: as recorded, or where that leads nowhere, by its command line.

    A process that is found by its command line may also be the keeper, which ignores the signals that a supervisor
    minds.
    """
    who = watched_by(paths)
    if who is not None and who.life(who.supervisor) is owners.Life.ALIVE:
        return [who.supervisor]
    real = os.path.realpath(paths.root)
    return [one for one, root in processes.running_script(SUPERVISE_FILE) if os.path.realpath(root) == real]


def removed_but_running(apps: str) -> list[str]:
    """The ids of apps that a supervisor of this machine still runs though their folder has gone.

    A supervisor ends such an app within seconds, unless it has been stopped.

    Args:
        apps: the folder of all apps.
    """
    roots = {root for _, root in processes.running_script(SUPERVISE_FILE) if not os.path.lexists(root)}
    real = os.path.realpath(apps)
    return sorted(os.path.basename(root) for root in roots if os.path.realpath(os.path.dirname(root)) == real)


def without_folder(paths: state_files.AppPaths) -> status.AppRecord | None:
    """What is known of an app whose folder is not there: that it runs, or nothing."""
    if not supervisors(paths):
        return None
    said = f"its folder {paths.root} was removed, so it ends within seconds; torchx cancel ends it now"
    return status.AppRecord(paths.app_id, paths.app_id.rpartition("-")[0], time.time(), status.RUNNING, said)


def recorded(paths: state_files.AppPaths) -> status.AppRecord | None:
    """The state of an app as last written: cheaper than ``truth``, and right while the supervisor lives."""
    try:
        return status.load(paths)
    except state_files.DamagedFileError:
        return truth(paths)


def truth(paths: state_files.AppPaths) -> status.AppRecord | None:
    """The state of an app as it is now; None when there is no such app.

    An app whose keeper and supervisor are dead has ended, whatever its status file says. Whoever finds that out ends
    what is left of it and writes the end down. An app whose status file is damaged is one whose processes tell its
    state; nothing is written then.
    """
    try:
        record = status.load(paths)
    except state_files.DamagedFileError as error:
        return _without_status(paths, str(error))
    if record is None or record.terminal:
        return record
    who = watched_by(paths)
    if who is None:
        if time.time() - record.created < _START_TIME or supervisors(paths):
            return record
        if os.path.lexists(paths.supervisor):
            record.state = status.FAILED
            record.msg = f"{paths.supervisor} is damaged, and no supervisor of the app runs here"
            return record
        reason = "it was never started: its submission was interrupted"
    else:
        life = who.life(who.supervisor)
        if life is owners.Life.ALIVE:
            return record
        if who.life(who.keeper) is owners.Life.ALIVE:
            # It is writing the end; one that was stopped writes it when it is continued.
            processes.send(who.keeper, signal.SIGCONT)
            return record
        if supervisors(paths):  # the file names others
            return record
        if life is owners.Life.ELSEWHERE:
            record.msg = f"as last written by {who.machine.hostname}, which cannot be checked from here"
            return record
        # The supervisor may have written the end and left between the two looks.
        try:
            record = status.load(paths)
        except state_files.DamagedFileError as error:
            return _without_status(paths, str(error))
        if record is None or record.terminal:
            return record
        if life is owners.Life.REBOOTED:
            reason = "the machine was rebooted while the app ran"
        else:
            reason = f"the supervisor (pid {who.supervisor.pid}) and the keeper (pid {who.keeper.pid}) were killed"
    return _mark_dead_once(paths, reason)


def _without_status(paths: state_files.AppPaths, damage: str) -> status.AppRecord | None:
    """What can be said about an app whose status file is damaged: what was asked for, and whether it runs."""
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
        record.state, record.msg = status.RUNNING, f"{damage}. The app runs: its supervisor is there"
    else:
        record.state, record.msg = status.FAILED, f"how it ended is lost: {damage}"
    for role in record.roles:
        for replica in role.replicas:
            replica.state = record.state
    return record


def _mark_dead_once(paths: state_files.AppPaths, reason: str) -> status.AppRecord | None:
    """``mark_dead`` by one of those who find the app dead at the same time; the record as it then is."""
    try:
        fd = os.open(paths.root, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # removed meanwhile
        return None
    try:
        with contextlib.suppress(OSError):  # a file system without locks: it is then said twice
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


def mark_dead(
    paths: state_files.AppPaths, record: status.AppRecord, request: DetachedRequest | None, reason: str
) -> None:
    """Write down that an app has ended without its supervisor, where people look: status, events, logs."""
    for role in record.roles:
        for replica in role.replicas:
            if not status.is_terminal(replica.state):
                _append_to_logs(paths.replica_logs(role.name, replica.id), reason)
    if request is not None:
        folder.remove_run_dir(paths, request.run_dir)
    events.append(paths.events, "ended", f"FAILED: {reason}")
    # A read-only or full disk: the truth is then found anew each time it is asked for.
    with contextlib.suppress(OSError):
        status.close_for_dead(paths, record, reason)


def _append_to_logs(log_dir: str, reason: str) -> None:
    if os.path.isdir(log_dir):
        logs = log_writer.ReplicaLogs(log_dir)
        logs.say(reason)
        logs.close()
