# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The truth about an app: what the status file says, checked against the processes it speaks of."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time

from torchx_monarch import events, processes
from torchx_monarch.backends.local import folder, pump, status, store, watchers
from torchx_monarch.backends.local.request import DetachedRequest

#: Seconds from the making of an app's folder to its supervisor's first word, at the very most.
_START_TIME = 60.0


def watched_by(paths: store.AppPaths) -> watchers.Watchers | None:
    """Who watches over the app; None until the supervisor has started."""
    data = store.read_json(paths.supervisor)
    return watchers.Watchers.from_json(data) if data else None


def ask_to_end(paths: store.AppPaths, grace: float | None) -> None:
    """Tell the app's supervisor to end it; a supervisor that is still starting finds the wish on disk.

    Args:
        grace: seconds from SIGTERM to SIGKILL; None is the app's own run option.

    Raises:
        OSError: the wish could not be written, or the supervisor belongs to another user.
    """
    store.write_json(paths.cancel, {"grace": grace})
    who = watched_by(paths)
    if who is not None:
        processes.send(who.supervisor, signal.SIGTERM)
        processes.send(who.supervisor, signal.SIGCONT)  # one that was stopped would not hear it


def recorded(paths: store.AppPaths) -> status.AppRecord | None:
    """The state of an app as last written: cheaper than ``truth``, and right while the supervisor lives."""
    return status.load(paths)


def truth(paths: store.AppPaths) -> status.AppRecord | None:
    """The state of an app as it is now; None when there is no such app.

    An app whose keeper and supervisor are dead has ended, whatever its status file says. Whoever finds that out ends
    what is left of it and writes the end down.
    """
    record = status.load(paths)
    if record is None or record.terminal:
        return record
    who = watched_by(paths)
    if who is None:
        if time.time() - record.created < _START_TIME:
            return record
        reason = "it was never started: its submission was interrupted"
    else:
        life = who.life(who.supervisor)
        if life is watchers.Life.ELSEWHERE:
            record.msg = f"as last written by {who.machine.hostname}, which cannot be checked from here"
            return record
        if life is watchers.Life.ALIVE:
            return record
        if who.life(who.keeper) is watchers.Life.ALIVE:
            # It is writing the end; one that was stopped writes it when it is continued.
            processes.send(who.keeper, signal.SIGCONT)
            return record
        # The supervisor may have written the end and left between the two looks.
        record = status.load(paths)
        if record is None or record.terminal:
            return record
        if life is watchers.Life.REBOOTED:
            reason = "the machine was rebooted while the app ran"
        else:
            reason = f"the supervisor (pid {who.supervisor.pid}) and the keeper (pid {who.keeper.pid}) were killed"
    return _bury_once(paths, reason)


def _bury_once(paths: store.AppPaths, reason: str) -> status.AppRecord | None:
    """``bury`` by one of those who find the app dead at the same time; the record as it then is."""
    try:
        fd = os.open(paths.root, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # removed meanwhile
        return None
    try:
        with contextlib.suppress(OSError):  # a file system without locks: it is then said twice
            fcntl.flock(fd, fcntl.LOCK_EX)
        record = status.load(paths)
        if record is None or record.terminal:
            return record
        data = store.read_json(paths.request)
        request = DetachedRequest.from_json(data) if data else None
        if request is not None and request.job:
            processes.kill_until_gone(lambda: processes.marked(request.job))
        bury(paths, record, request, reason)
        return record
    finally:
        os.close(fd)


def bury(paths: store.AppPaths, record: status.AppRecord, request: DetachedRequest | None, reason: str) -> None:
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
        logs = pump.ReplicaLogs(log_dir)
        logs.say(reason)
        logs.close()
