# SPDX-License-Identifier: BSD-3-Clause
"""Put the replicas of an app together from what its machines have answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state_files import DamagedFileError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.status import AppRecord
from torchx_monarch.backends.ssh.in_job.wire import Ending, Place
from torchx_monarch.backends.ssh.native import SshError
from torchx_monarch.model import codec
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec
from torchx_monarch.model.state import State


@dataclass(frozen=True)
class Found:
    """One replica as its machine has answered.

    Attributes:
        place: where it runs.
        record: its record.
        ending: how the app was asked to end; None if it was not.
        hostname: the name of its machine.
        rank_restarts: how often its host has restarted ranks.
    """

    place: Place
    record: AppRecord
    ending: Ending | None
    hostname: str
    rank_restarts: int

    @classmethod
    def of(cls, answer: Any, hostname: str) -> Found | None:
        """Decode the answer of a machine about one replica; None if it has none.

        Raises:
            DamagedFileError: a file of the replica is damaged.
        """
        if answer is None:
            return None
        if "damaged" in answer:
            raise DamagedFileError(f"{hostname}: {answer['damaged']}")
        ending = answer["ending"] and codec.decode(Ending, answer["ending"])
        place, record = codec.decode(Place, answer["place"]), codec.decode(AppRecord, answer["record"])
        return cls(place, record, ending, hostname, int(answer["rank_restarts"]))


@dataclass(frozen=True)
class SshSnapshot(AppSnapshot):
    """An app and where it runs.

    Attributes:
        place: where its first known replica runs.
    """

    place: Place = field(default_factory=lambda: Place("", 0, 0, 0.0, 0.0, [], "", "", ""))


def build(app_id: str, found: Mapping[tuple[int, int], Found], lost: Mapping[str, SshError]) -> SshSnapshot:
    """Assemble the snapshot of an app.

    Args:
        found: its replicas, by index of the role and id; at least one.

    Raises:
        DamagedFileError: a file of a replica is damaged.
    """
    first = next(iter(found.values()))
    place = first.place
    submitted = SubmittedApp.unpack(place.packed, f"the place.json of {app_id} on {first.hostname}")
    living = any(not replica.record.terminal for replica in found.values())
    roles = []
    for index, (spec, machines) in enumerate(zip(submitted.roles, place.machines, strict=True)):
        replicas = []
        for k, machine in enumerate(machines):
            replica = found.get((index, k))
            if replica is not None:
                replicas.append(_replica(spec.name, k, replica))
            else:
                replicas.append(_absent(spec, k, machine, lost.get(machine), living))
        roles.append(RoleSnapshot(spec, replicas))
    endings = sorted((replica.ending for replica in found.values() if replica.ending), key=lambda ending: ending.time)
    return SshSnapshot(
        app_id=app_id,
        name=submitted.app.name,
        roles=roles,
        app=submitted.app,
        created=place.created,
        started=min((replica.record.started for replica in found.values() if replica.record.started), default=0.0),
        grace=place.grace,
        ending=Outcome(endings[0].state, endings[0].message, time=endings[0].time) if endings else None,
        notes=[f"{error}" for error in lost.values()],
        place=place,
    )


def _replica(role: str, k: int, found: Found) -> ReplicaSnapshot:
    record = found.record
    replica_record = record.roles[0].replicas[0] if record.roles and record.roles[0].replicas else None
    ended = record.ended or 0.0
    more: dict[str, Any] = {
        "hostname": found.hostname,
        "address": found.place.address if not record.terminal else "",
        "started": (replica_record.started if replica_record else None) or 0.0,
        "restarts": record.restarts,
        "rank_restarts": found.rank_restarts,
    }
    if not record.terminal:
        starting = replica_record is None or replica_record.state is State.PENDING
        state = State.PENDING if starting else State.RUNNING
        return ReplicaSnapshot(role, k, state, is_stopping=found.ending is not None, **more)
    if replica_record is None or (record.state is State.CANCELLED and not replica_record.started):
        return ReplicaSnapshot(role, k, State.CANCELLED, ended=ended, **more)
    more["ended"] = replica_record.ended or ended
    if record.state is State.SUCCEEDED or replica_record.state is State.SUCCEEDED:
        return ReplicaSnapshot(role, k, State.SUCCEEDED, exit_code=0, **more)
    message = record.msg
    if "rebooted" in message or "were killed" in message:
        message = f"replica {role}/{k} on {found.hostname}: {message}"
    return ReplicaSnapshot(
        role,
        k,
        State.FAILED,
        exit_code=replica_record.exit_code,
        failure=message,
        error=replica_record.error or "",
        was_stopped=record.state is State.CANCELLED,
        **more,
    )


def _absent(spec: RoleSpec, k: int, machine: str, error: SshError | None, living: bool) -> ReplicaSnapshot:
    """Return a replica of which nothing is known now."""
    if error is None:
        failure = f"the folder of replica {spec.name}/{k} on {machine} was removed"
        return ReplicaSnapshot(spec.name, k, State.UNKNOWN, failure=failure if spec.runs_hosts else "")
    reason = f"{machine} cannot be reached: {error.reason}"
    # It may come back; otherwise the other hosts end when its lease has.
    may_return = spec.retry_policy is RetryPolicy.REPLICA and spec.max_retries > 0
    if living or (may_return and not spec.runs_hosts):
        return ReplicaSnapshot(spec.name, k, State.RUNNING, hostname=machine, waiting=reason)
    return ReplicaSnapshot(spec.name, k, State.UNKNOWN, hostname=machine, failure=f"replica {spec.name}/{k}: {reason}")


def by_machine(machines: Sequence[Sequence[str]]) -> dict[str, list[tuple[int, int]]]:
    """Return index of the role and id of the replicas of each machine."""
    every: dict[str, list[tuple[int, int]]] = {}
    for index, names in enumerate(machines):
        for k, name in enumerate(names):
            every.setdefault(name, []).append((index, k))
    return every
