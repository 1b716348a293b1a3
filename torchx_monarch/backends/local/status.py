# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The record of an app: its state, its replicas, why it ended. The content of status.json.

The supervisor writes it while it lives. A process that detects the supervisor's death records the end
(``close_for_dead``).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.local.request import DetachedRequest

PENDING = "PENDING"
RUNNING = "RUNNING"
SUCCEEDED = "SUCCEEDED"
FAILED = "FAILED"
CANCELLED = "CANCELLED"
TERMINAL = frozenset({SUCCEEDED, FAILED, CANCELLED})
STATES = TERMINAL | {PENDING, RUNNING}

#: Maximum characters of a message in the brief form, of six bytes each at most.
_BRIEF_TEXT = 4000
#: Minimum bytes to reserve for the brief form: for the app (names among them) and for each replica.
_BRIEF_BASE = 64 * 1024
_BRIEF_REPLICA = 256


def is_terminal(state: str) -> bool:
    """Return whether an app or a replica in this state has ended. The names are those of torchx.specs.AppState."""
    return state in TERMINAL


@dataclass
class ReplicaRecord:
    """One replica, in its latest start.

    Attributes:
        id: id of the replica.
        state: a state of torchx.specs.AppState.
        pid: its process; None before the start.
        exit_code: as in ``subprocess``, -N for signal N; None while it runs, or if no process observed the end.
        restarts: how often it was restarted.
        error: the content of its error file, or of a substitute made from the exit code, as JSON text; None without
            failure.
        started, ended: seconds since the epoch; None if that has not happened.
    """

    id: int
    state: str = PENDING
    pid: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    error: str | None = None
    started: float | None = None
    ended: float | None = None


@dataclass
class RoleRecord:
    """The replicas of one role."""

    name: str
    replicas: list[ReplicaRecord] = field(default_factory=list)


@dataclass
class AppRecord:
    """One app.

    Attributes:
        app_id: id of the app.
        name: the AppDef's name.
        created: when it was submitted, in seconds since the epoch.
        state: a state of torchx.specs.AppState.
        msg: for people: why it ended as it did, and what else they should know; "" for no message.
        error: the content of the error file of the replica that caused the end, as JSON text; None without one.
        restarts: how often the app, a role or a replica was restarted.
        ended: seconds since the epoch; None before the end.
        roles: its roles.
    """

    app_id: str
    name: str
    created: float
    state: str = PENDING
    msg: str = ""
    error: str | None = None
    restarts: int = 0
    ended: float | None = None
    roles: list[RoleRecord] = field(default_factory=list)

    @property
    def terminal(self) -> bool:
        return is_terminal(self.state)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def brief(self) -> dict[str, Any]:
        """Return the record as ``to_json`` does, with texts of bounded length: for a disk with little room."""
        data = self.to_json()
        data["msg"], data["error"] = self.msg[:_BRIEF_TEXT], None
        for role in data["roles"]:
            for replica in role["replicas"]:
                replica["error"] = None
        return data


def new_roles(request: DetachedRequest) -> list[RoleRecord]:
    """Return the records of an app's roles before any replica was started."""
    return [RoleRecord(r.name, [ReplicaRecord(id=k) for k in range(len(r.replicas))]) for r in request.roles]


def load(paths: state_files.AppPaths) -> AppRecord | None:
    """Read the record of an app; return None if it does not exist.

    Raises:
        state_files.DamagedFileError: the file exists but does not hold a valid record.
    """
    record = state_files.load(AppRecord, paths.status, paths.trusted)
    if record is not None:
        found = {record.state, *(replica.state for role in record.roles for replica in role.replicas)}
        if unknown := found - STATES:
            raise state_files.DamagedFileError(f"{paths.status} is damaged: {min(unknown)[:40]!r} is no state")
        record.app_id = paths.app_id
    return record


def close_for_dead(paths: state_files.AppPaths, record: AppRecord, reason: str) -> None:
    """Record the end of an app whose supervisor is dead: FAILED, for this reason.

    Raises:
        OSError: the record could not be written. It is changed in memory all the same.
    """
    now = time.time()
    for role in record.roles:
        for replica in role.replicas:
            if not is_terminal(replica.state):
                replica.state, replica.ended = FAILED, now
    record.state, record.msg, record.ended = FAILED, reason, now
    save_last(paths, record)


def reserve_bytes(record: AppRecord) -> int:
    """Return the disk space that suffices for the final record of this app, at least in its ``brief`` form."""
    return _BRIEF_BASE + _BRIEF_REPLICA * sum(len(role.replicas) for role in record.roles)


def save_last(paths: state_files.AppPaths, record: AppRecord) -> None:
    """Write the final record of an app; if the disk is full, in its ``brief`` form.

    Raises:
        OSError: the brief form could not be written either.
    """
    try:
        state_files.write_last_json(paths.status, record.to_json(), paths.reserve)
    except OSError:
        state_files.write_last_json(paths.status, record.brief(), paths.reserve)
