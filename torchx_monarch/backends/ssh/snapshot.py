# SPDX-License-Identifier: BSD-3-Clause
"""Put the replicas of an app together from what its machines have answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.ssh.in_job.wire import FoundReplica, Layout
from torchx_monarch.backends.ssh.native import SshError
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec
from torchx_monarch.model.state import State


@dataclass(frozen=True)
class SshSnapshot(AppSnapshot):
    """An app and where it runs."""

    layout: Layout = Layout([])


def build(app_id: str, answers: Iterable[FoundReplica], lost: Mapping[str, SshError]) -> SshSnapshot:
    """Assemble the snapshot of an app from at least one replica; ``lost`` are the machines that cannot be reached."""
    found = {(replica.place.role, replica.place.replica): replica for replica in answers}
    first = next(iter(found.values()))
    place = first.place
    submitted = SubmittedApp.unpack(place.packed, f"the place.json of {app_id} on {first.record.hostname}")
    # A sidecar lives until the others have ended: the wait for a machine must not depend on it.
    living = any(not (replica.record.terminal or submitted.roles[role].sidecar) for (role, _), replica in found.items())
    endings = [replica.ending for replica in found.values() if replica.ending]
    return SshSnapshot(
        app_id=app_id,
        name=submitted.app.name,
        roles=[
            RoleSnapshot(
                spec,
                [
                    _replica(spec.name, k, found[index, k])
                    if (index, k) in found
                    else _absent(spec, k, machine, lost.get(machine), living)
                    for k, machine in enumerate(machines)
                ],
            )
            for index, (spec, machines) in enumerate(zip(submitted.roles, place.layout.machines, strict=True))
        ],
        app=submitted.app,
        created=place.created,
        started=min((replica.record.started for replica in found.values() if replica.record.started), default=0.0),
        grace=first.record.grace,
        ending=min(endings, key=lambda ending: ending.time, default=None),
        events=[event for replica in found.values() for event in replica.events],
        notes=[str(lost[machine]) for machine in place.layout.replicas if machine in lost],
        layout=place.layout,
    )


def _replica(role: str, k: int, found: FoundReplica) -> ReplicaSnapshot:
    snapshot = found.record.replica_snapshot(role, found.ending)
    if not snapshot.state.is_terminal:
        return replace(snapshot, address=found.place.address)
    if snapshot.state is State.FAILED and snapshot.exit_code is None:  # its supervisor was killed
        return replace(snapshot, failure=f"replica {role}/{k} on {snapshot.hostname}: {snapshot.failure}")
    return snapshot


def _absent(spec: RoleSpec, k: int, machine: str, error: SshError | None, living: bool) -> ReplicaSnapshot:
    if error is None:
        failure = f"the folder of replica {spec.name}/{k} on {machine} was removed"
        return ReplicaSnapshot(spec.name, k, State.UNKNOWN, failure=failure if spec.runs_hosts else "")
    reason = f"{machine} cannot be reached: {error.reason}"
    # It may come back; otherwise the other hosts end when its lease has.
    may_return = spec.retry_policy is RetryPolicy.REPLICA and spec.max_retries > 0
    if living or (may_return and not spec.runs_hosts):
        return ReplicaSnapshot(spec.name, k, State.RUNNING, hostname=machine, waiting=reason)
    return ReplicaSnapshot(spec.name, k, State.UNKNOWN, hostname=machine, failure=f"replica {spec.name}/{k}: {reason}")
