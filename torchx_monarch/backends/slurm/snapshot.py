# SPDX-License-Identifier: BSD-3-Clause
"""The snapshot of an app."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchx_monarch.backends.core import state_files, submitted_app
from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.slurm import folder as folders
from torchx_monarch.backends.slurm import job_state, macros, native, records
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.job_state import JobState
from torchx_monarch.backends.slurm.native import Job, SlurmError
from torchx_monarch.backends.slurm.records import TaskRecord
from torchx_monarch.insight import events
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State


@dataclass(frozen=True, kw_only=True)
class SlurmSnapshot(AppSnapshot):
    """An app on Slurm.

    Attributes:
        job: the state of its job.
    """

    job: JobState


# -- the state of the job ----------------------------------------------------------------------------------------------


def state_of(app_id: str) -> JobState | None:
    """Return the state of an app; None if no app of this scheduler has this id.

    Raises:
        SlurmError: a command of Slurm's fails or cannot be run, and the folder has no final state.
    """
    if not (app_id.isascii() and app_id.isdigit()):
        return None
    folder = folders.find(app_id)
    try:
        components = [job for job in native.live_job(app_id) if job.leader == app_id]
    except SlurmError:
        if folder is None or not job_state.has_recorded_end(folder):
            raise
        components = []  # the records in its folder have the final state
    if components:
        # Slurm reuses job ids, and clusters may share a home directory: the job's comment takes precedence.
        folder = folders.folder_of_comment(components[0].comment) or folder
    if folder is None or components and is_deleted(app_id, folder, components):
        return None
    other_user = next((job.other_user for job in components if job.other_user), "")
    if not components and not job_state.has_recorded_end(folder):
        components = native.recorded_jobs([app_id]).get(app_id, [])[:1]
    return replace(job_state.of_job(folder, components), other_user=other_user)


def is_deleted(app_id: str, folder: JobFolder, components: Sequence[Job]) -> bool:
    """Return whether a job that Slurm still remembers was deleted (``folder.delete``) through this state directory.

    `torchx delete` waits for the job's end, so the folder of a job that lives was removed by another program.

    Args:
        folder: its folder.
    """
    return folders.is_removed(app_id, folder) and not any(job.is_live for job in components)


# -- the app -----------------------------------------------------------------------------------------------------------


def of_app(app_id: str, job: JobState, *, brief: bool) -> SlurmSnapshot:
    """Return the snapshot of an app.

    Raises:
        DamagedFileError: app.json is damaged, and the snapshot is not brief.
    """
    app = None
    try:
        app = submitted_app.load(job.folder.app, job.folder.trusted)
    except state_files.DamagedFileError:
        if not brief:
            raise
    # Without app.json, each component of the job is shown as a role.
    components = job.components
    specs = (
        app.roles
        if app
        else [RoleSpec(f"{component.name}-{k}" if k else component.name) for k, component in enumerate(components)]
    )
    roles = [RoleSnapshot(spec, _replicas(job, spec, index, brief)) for index, spec in enumerate(specs)]
    name = app.app.name if app else components[0].name if components else app_id
    restarts = None
    if not brief:
        restarts = _restarts(job) + sum(replica.restarts for role in roles for replica in role.replicas)
    return SlurmSnapshot(
        app_id=app_id,
        name=name,
        roles=roles,
        app=app.app if app else None,
        created=job.folder.submitted,
        started=first_start(job),
        grace=records.read_submission(job.folder).grace,
        native=job.outcome,
        is_supervised=True,
        restarts=restarts,
        ui_url=f"file://{job.folder.root}",
        job=job,
    )


def first_start(job: JobState) -> float:
    """Return when a job first ran, in seconds since the epoch; 0 if unknown."""
    return job.record.started if job.record else 0.0


def _replicas(job: JobState, role: RoleSpec, index: int, brief: bool) -> list[ReplicaSnapshot]:
    """Return the replicas of a role from their records.

    Args:
        brief: read no records; the node is known of replica 0 only then.
    """
    now = job.record.role_restarts.get(role.name, 0) if job.record else 0
    every = [None if brief else records.read_task(job.folder, role.name, number) for number in range(role.replicas)]
    nodes = job.nodes[index] if index < len(job.nodes) else ""
    all_recorded = all(record is not None and record.job_restart == now for record in every)
    hosts = [] if not nodes or all_recorded else [macros.first_node(nodes)] if brief else native.hostnames(nodes)
    found = []
    for replica, record in enumerate(every):
        # The record of an earlier start counts only for a job that ended before its next start.
        counts = record is not None and (record.job_restart == now or job.state.is_terminal)
        state = _replica_state(job.state, record if counts else None)
        hostname = record.hostname if record and counts else ""
        found.append(
            ReplicaSnapshot(
                role.name,
                replica,
                state,
                hostname=hostname or (hosts[replica] if replica < len(hosts) else ""),
                started=(record.started if record else None) or 0.0,
                ended=(record.ended if record else None) or 0.0,
                exit_code=record.exit_code if record and state.is_terminal else None,
                restarts=max(0, record.restarts - record.job_restart) if record else 0,
                error=(record.error if record and state.is_terminal else None) or "",
            )
        )
    return found


def _replica_state(job: State, record: TaskRecord | None) -> State:
    """Return the state of a replica from its job's state and its record, which is None if it does not count."""
    if job is State.PENDING:
        return State.PENDING
    if job.is_terminal:
        return record.state if record and record.state.is_terminal else job
    return record.state if record else State.PENDING


def _restarts(job: JobState) -> int:
    """Count the restarts of a job, its roles and their ranks; not those of single replicas."""
    now = job.record.restarts if job.record else 0
    if job.components:
        now = max(now, job.components[0].restarts)
    happened, _ = events.read(job.folder.events, below=job.folder.trusted)
    return now + len([event for event in happened if event["kind"] == "rank_restart"])
