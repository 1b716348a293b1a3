# SPDX-License-Identifier: BSD-3-Clause
"""The replicas of an app, by the records of its tasks and by what the batch system reports. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchx_monarch.backends.batch.folder import JobFolder, TaskRecord
from torchx_monarch.backends.core.snapshot import Outcome, ReplicaSnapshot
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State


class QueuedJob(NamedTuple):
    """A job, or a task of an array job, as the batch system reports it.

    Attributes:
        state: PENDING or RUNNING, or how it has ended, if the batch system remembers that.
        reason: why it waits, or why it has ended; empty if there is nothing to say.
        is_stuck: whether it can never start.
    """

    state: State = State.RUNNING
    reason: str = ""
    is_stuck: bool = False


def read_replica(
    spec: RoleSpec, k: int, folder: JobFolder, job: QueuedJob | None, ending: Outcome | None
) -> ReplicaSnapshot:
    """Return a replica by its record and its job.

    Args:
        job: what the batch system reports of its job; None if that has ended.
        ending: how the app was asked to end.
    """
    record = folder.replica(spec.name, k).load_record()
    if record is None:
        return _without_record(spec.name, k, job, ending)
    latest = record.roles[0].replicas[0]
    more: dict[str, Any] = {"hostname": record.hostname, "started": latest.started or 0.0, "restarts": record.restarts}
    is_preempted = _was_preempted(record, ending)
    if job is not None and not job.state.is_terminal and (is_preempted or job.state is State.PENDING):
        return _waiting(spec.name, k, job, ending, job.reason or ("was preempted" if is_preempted else ""), more)
    more["ended"] = latest.ended or record.ended or 0.0
    if record.terminal:
        return _ended(spec.name, k, record, job, more)
    if job is not None and not job.state.is_terminal:
        state = State.PENDING if latest.state is State.PENDING else State.RUNNING
        return ReplicaSnapshot(spec.name, k, state, is_stopping=ending is not None, **more)
    reason = (job.reason if job else "") or "it was killed by the batch system, or its node was lost"
    failure = f"replica {spec.name}/{k} on {record.hostname}: {reason}"
    return ReplicaSnapshot(spec.name, k, State.FAILED, failure=failure, was_stopped=ending is not None, **more)


def _without_record(role: str, k: int, job: QueuedJob | None, ending: Outcome | None) -> ReplicaSnapshot:
    """Return a replica whose task has not begun."""
    if job is not None and not job.state.is_terminal:
        return _waiting(role, k, job, ending, job.reason, {})
    if ending is not None:
        return ReplicaSnapshot(role, k, State.CANCELLED)
    reason = (job.reason if job else "") or "it was removed from the queue"
    return ReplicaSnapshot(role, k, State.FAILED, failure=f"replica {role}/{k} has not started: {reason}")


def _waiting(
    role: str, k: int, job: QueuedJob, ending: Outcome | None, reason: str, more: Mapping[str, Any]
) -> ReplicaSnapshot:
    """Return a replica whose job waits, or whose task is about to begin."""
    is_stopping = ending is not None and job.state is State.RUNNING
    return ReplicaSnapshot(
        role, k, State.PENDING, waiting=reason, is_stuck=job.is_stuck, is_stopping=is_stopping, **more
    )


def _ended(role: str, k: int, record: TaskRecord, job: QueuedJob | None, more: Mapping[str, Any]) -> ReplicaSnapshot:
    """Return a replica whose record says that it has ended."""
    latest = record.roles[0].replicas[0]
    if record.state is State.SUCCEEDED:
        return ReplicaSnapshot(role, k, State.SUCCEEDED, exit_code=0, **more)
    stopped = record.state is State.CANCELLED
    return ReplicaSnapshot(
        role,
        k,
        State.CANCELLED if stopped else State.FAILED,
        failure=(job.reason if job else "") or record.msg,
        error=latest.error or "",
        exit_code=latest.exit_code,
        was_stopped=stopped,
        **more,
    )


def _was_preempted(record: TaskRecord, ending: Outcome | None) -> bool:
    """Return whether the batch system, and no request, has stopped a replica."""
    return record.state is State.CANCELLED and ending is None


def has_ended(folder: JobFolder, role: str, k: int, ending: Outcome | None) -> bool:
    """Return whether the record of a replica says that it has ended, and will not start again."""
    record = folder.replica(role, k).load_record()
    return record is not None and record.terminal and not _was_preempted(record, ending)
