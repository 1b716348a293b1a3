# SPDX-License-Identifier: BSD-3-Clause
"""The replicas of an app, by the records of its tasks and by what the batch system reports. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchx_monarch.backends.batch.folder import JobFolder
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.local.supervision import SupervisorRecord
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State


class QueuedJob(NamedTuple):
    """A job, or a task of an array job, as the batch system reports it.

    Attributes:
        state: PENDING or RUNNING, or how it has ended, if the batch system remembers that.
        reason: why it waits, or why it has ended; empty if there is nothing to say.
        is_stuck: whether it can never start.
        name: its name, by which a job is found whose submitter was killed before it had read the id.
    """

    state: State = State.RUNNING
    reason: str = ""
    is_stuck: bool = False
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class BatchSnapshot(AppSnapshot):
    """The state of an app.

    Attributes:
        folder: its folder.
        files: what its files say, but for events and logs, to be compared.
        jobs: the batch system's ids of its jobs.
    """

    folder: JobFolder
    files: object
    jobs: Sequence[str] = ()


def read_app(
    app_id: str,
    name: str,
    folder: JobFolder,
    specs: Sequence[RoleSpec],
    known: Iterable[Iterable[QueuedJob | None]],
    ending: Outcome | None,
    **more: Any,
) -> BatchSnapshot:
    """Return an app by the records of its tasks, and what the batch system says of them, with further fields.

    Args:
        known: for each replica of each role its job; None if the batch system does not know it (any more).
    """
    records, roles, starts = [folder.records(spec) for spec in specs], [], []
    for spec, found, jobs in zip(specs, records, known, strict=True):
        both = zip(found, jobs, strict=True)
        replicas = [read_replica(spec, k, record, job, ending) for k, (record, job) in enumerate(both)]
        roles.append(RoleSnapshot(spec, replicas))
        starts += [record.started for record in found if record is not None and record.started]
    started, files = min(starts, default=0.0), (records, ending)
    return BatchSnapshot(app_id, name, roles, started=started, ending=ending, folder=folder, files=files, **more)


def read_replica(
    spec: RoleSpec, k: int, record: SupervisorRecord | None, job: QueuedJob | None, ending: Outcome | None
) -> ReplicaSnapshot:
    """Return a replica by its record and its job, which is None if the batch system does not know it any more."""
    queued = None if job is None or job.state.is_terminal else job
    reason = job.reason if job else ""
    if record is None:
        return _not_started(spec.name, k, queued, reason, ending)
    found = record.replica_snapshot(spec.name, ending)
    is_preempted = _was_preempted(record, ending)
    if queued is not None and (is_preempted or queued.state is State.PENDING):
        before = ReplicaSnapshot(
            spec.name, k, State.PENDING, found.hostname, started=found.started, restarts=found.restarts
        )
        return _waiting(before, queued, ending, "was preempted" if is_preempted else "")
    if record.terminal and not is_preempted:
        return replace(found, failure=reason or found.failure) if found.failure else found
    if record.terminal:
        reason = reason or "the batch system has ended its job, as at a time limit"
    elif queued is None:
        reason = reason or "it was killed by the batch system, or its node was lost"
    else:
        return found
    failure = f"replica {found.name}{f' on {found.hostname}' if found.hostname else ''}: {reason}"
    was_stopped = is_preempted or ending is not None
    return replace(found, state=State.FAILED, failure=failure, was_stopped=was_stopped, is_stopping=False, waiting="")


def _not_started(role: str, k: int, queued: QueuedJob | None, reason: str, ending: Outcome | None) -> ReplicaSnapshot:
    if queued is not None:
        return _waiting(ReplicaSnapshot(role, k, State.PENDING), queued, ending)
    if ending is not None:
        return ReplicaSnapshot(role, k, State.CANCELLED)
    failure = f"replica {role}/{k} has not started: {reason or 'it was removed from the queue'}"
    return ReplicaSnapshot(role, k, State.FAILED, failure=failure)


def _waiting(found: ReplicaSnapshot, job: QueuedJob, ending: Outcome | None, reason: str = "") -> ReplicaSnapshot:
    """Return a replica whose job waits, by default for ``reason``, or whose task is about to begin.

    One that can never start has failed: no process of the app would tell its end.
    """
    if job.is_stuck:
        failure = f"replica {found.name} cannot start: {job.reason}"
        return replace(found, state=State.FAILED, failure=failure, is_stuck=True)
    is_stopping = ending is not None and job.state is State.RUNNING
    return replace(found, state=State.PENDING, waiting=job.reason or reason, is_stopping=is_stopping)


def _was_preempted(record: SupervisorRecord, ending: Outcome | None) -> bool:
    """Return whether the batch system, and no request, has stopped a replica."""
    return record.state is State.CANCELLED and ending is None


def has_ended(folder: JobFolder, role: str, k: int, ending: Outcome | None) -> bool:
    """Return whether the record of a replica says that it has ended, and will not start again."""
    record = folder.replica(role, k).load_record()
    return record is not None and record.terminal and not _was_preempted(record, ending)
