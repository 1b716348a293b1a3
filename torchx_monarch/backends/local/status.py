# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is known about an app: its state, its replicas, why it ended. The content of status.json.

The supervisor writes it while it lives; whoever finds the supervisor dead writes the end (``close_for_dead``).
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

#: Characters of a message in the brief form, of six bytes each at most.
_BRIEF_TEXT = 4000
#: Bytes of the brief form on disk, for the app (names among them) and for each replica; at least.
_BRIEF_BASE = 64 * 1024
_BRIEF_REPLICA = 256


def is_terminal(state: str) -> bool:
    """Whether an app or a replica in this state has ended. The names are those of torchx.specs.AppState."""
    return state in TERMINAL


@dataclass
class ReplicaRecord:
    """One replica, in its latest start.

    Attributes:
        exit_code: as ``subprocess`` has it, -N for signal N; None while it runs, or when nobody was there to see it.
        restarts: how many times it was started again.
        error: the content of its error file (or one in the same form made up from the exit code), as JSON text.
        started, ended: seconds since the epoch.
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
    name: str
    replicas: list[ReplicaRecord] = field(default_factory=list)


@dataclass
class AppRecord:
    """One app.

    Attributes:
        name: the AppDef's name.
        msg: for people: why it ended as it did, and what else they should know; "" when there is nothing to say.
        error: the error file's content of the replica that decided the end, as JSON text.
        restarts: how many times the app, a role or a replica was started again.
        created, ended: seconds since the epoch.
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
        """As ``to_json``, with texts of bounded length: for a disk with little room."""
        data = self.to_json()
        data["msg"], data["error"] = self.msg[:_BRIEF_TEXT], None
        for role in data["roles"]:
            for replica in role["replicas"]:
                replica["error"] = None
        return data


def new_roles(request: DetachedRequest) -> list[RoleRecord]:
    """The records of an app's roles before anything was started."""
    return [RoleRecord(r.name, [ReplicaRecord(id=k) for k in range(len(r.replicas))]) for r in request.roles]


def load(paths: state_files.AppPaths) -> AppRecord | None:
    """The record on file; None when there is none.

    Raises:
        store.DamagedFileError: there is a file, and no record in it.
    """
    record = state_files.load(AppRecord, paths.status, paths.trusted)
    if record is not None:
        found = {record.state, *(replica.state for role in record.roles for replica in role.replicas)}
        if unknown := found - STATES:
            raise state_files.DamagedFileError(f"{paths.status} is damaged: {min(unknown)[:40]!r} is no state")
        record.app_id = paths.app_id
    return record


def close_for_dead(paths: state_files.AppPaths, record: AppRecord, reason: str) -> None:
    """End the record of an app whose supervisor is gone: FAILED, for this reason.

    Raises:
        OSError: it could not be written. The record is changed all the same.
    """
    now = time.time()
    for role in record.roles:
        for replica in role.replicas:
            if not is_terminal(replica.state):
                replica.state, replica.ended = FAILED, now
    record.state, record.msg, record.ended = FAILED, reason, now
    save_last(paths, record)


def reserve_bytes(record: AppRecord) -> int:
    """Disk space that is enough for the last word about this app, at least for its ``brief`` form."""
    return _BRIEF_BASE + _BRIEF_REPLICA * sum(len(role.replicas) for role in record.roles)


def save_last(paths: state_files.AppPaths, record: AppRecord) -> None:
    """Write the last word about an app; on a full disk without what needs much space.

    Raises:
        OSError: not even that could be done.
    """
    try:
        state_files.write_last_json(paths.status, record.to_json(), paths.reserve)
    except OSError:
        state_files.write_last_json(paths.status, record.brief(), paths.reserve)
