# SPDX-License-Identifier: BSD-3-Clause
"""The record of an app: its state, its replicas, why it ended. The content of status.json.

Only the supervisor writes it. If that dies, readers derive the end from its lock (``folder``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local.request import LocalRequest
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.replica import ReplicaRecord


@dataclass
class RoleRecord:
    """The replicas of one role."""

    name: str
    replicas: list[ReplicaRecord] = field(default_factory=list)


@dataclass
class AppRecord:
    """One app.

    Attributes:
        created: when it was submitted, in seconds since the epoch.
        msg: for users: why it ended, and further facts; "" for no message.
        error: the content of the error file of the replica that caused the end, as JSON text; None without one.
        restarts: how often the app, a role or a replica was restarted.
        started: when its first replica was first started; None before.
        hostname: the name of the machine that runs it, by which other hosts reach that; empty once a batch system has
            taken the node away.
    """

    app_id: str
    name: str
    created: Seconds
    state: State = State.PENDING
    msg: str = ""
    error: str | None = None
    restarts: int = 0
    started: Seconds | None = None
    ended: Seconds | None = None
    roles: list[RoleRecord] = field(default_factory=list)
    hostname: str = ""
    grace: float = 30.0

    @property
    def terminal(self) -> bool:
        return self.state.is_terminal


def new_roles(request: LocalRequest) -> list[RoleRecord]:
    """Return the records of an app's roles before any replica was started."""
    return [RoleRecord(r.name, [ReplicaRecord(id=r.first + k) for k in range(len(r.replicas))]) for r in request.roles]


def load(paths: state_files.AppPaths) -> AppRecord | None:
    """Read the record of an app; return None if it does not exist; errors as for ``state_files.load``."""
    record = state_files.load(AppRecord, paths.status, paths.trusted)
    if record is not None:
        record.app_id = paths.app_id
    return record


def reserve_bytes(record: AppRecord) -> int:
    """Return the disk space that suffices for the final record of this app without error files."""
    # Names, and the message, of which ``save_last`` keeps 4,000 characters of six bytes each at most.
    return 64 * 1024 + 256 * sum(len(role.replicas) for role in record.roles)


def save_last(paths: state_files.AppPaths, record: AppRecord) -> None:
    """Write the final record of an app; on a full disk without what does not fit into the reserve: error files."""
    try:
        state_files.write_last_json(paths.status, asdict(record), paths.reserve)
    except OSError:
        record.msg, record.error = record.msg[:4000], None
        for role in record.roles:
            for replica in role.replicas:
                replica.error = None
        state_files.write_last_json(paths.status, asdict(record), paths.reserve)
