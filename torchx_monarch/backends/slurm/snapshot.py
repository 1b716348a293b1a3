# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The snapshot of an app: a job, a whole job array, or an array task (``123_7``), which is an app of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchx_monarch.backends.core import state_files, submitted_app
from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.slurm import array, array_state, job_state, macros, native, records
from torchx_monarch.backends.slurm import folder as folders
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.job_state import JobState
from torchx_monarch.backends.slurm.native import Job, SlurmError
from torchx_monarch.backends.slurm.records import TaskRecord
from torchx_monarch.insight import events
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import MOST_REPLICAS, RoleSpec
from torchx_monarch.model.state import State


@dataclass(frozen=True, kw_only=True)
class SlurmSnapshot(AppSnapshot):
    """An app on Slurm.

    Attributes:
        job: the state of the job, the array or the array task.
    """

    job: JobState


# -- the state of the job ----------------------------------------------------------------------------------------------


def look(app_id: str) -> JobState | None:
    """Return the state of an app; None if no app of this scheduler has this id.

    Args:
        app_id: the id of a job, an array or an array task.

    Raises:
        SlurmError: a command of Slurm's fails or cannot be run, and the folder has no final state.
    """
    parts = array.split(app_id)
    if parts is None:
        return None
    leader, index = parts
    folder = folders.find(leader)
    try:
        components = [job for job in native.live_job(leader) if job.leader == leader]
    except SlurmError:
        if folder is None or not has_recorded_end(folder):
            raise
        components = []  # the records in its folder have the final state
    if components:
        # Slurm reuses job ids, and clusters may share a home directory: the job's comment takes precedence.
        folder = folders.noted(components[0].comment) or folder
    if folder is None or components and is_deleted(leader, folder, components):
        return None
    other_user = next((job.other_user for job in components if job.other_user), "")
    whole = known(folder, components, lambda: native.recorded_job(leader))
    found = whole if index is None else whole.tasks.get(index)
    return found and replace(found, other_user=other_user)


def known(folder: JobFolder, components: list[Job], recorded: Callable[[], list[Job]]) -> JobState:
    """Return the state of a job or an array, from Slurm's records and the files in its folder.

    Args:
        folder: the folder of the job or the array.
        components: Slurm's records; empty if Slurm has forgotten the job.
        recorded: queries the accounting database for more records; called only if they are needed.
    """
    indices = records.read_submission(folder).tasks
    if not indices:
        indices = sorted({*folder.begun_tasks(), *(index for job in components for index in job.tasks)})
    if indices:
        return array_state.of_array(folder, indices, components, recorded)
    if components or job_state.has_recorded_end(folder):
        return job_state.of_job(folder, components)
    return job_state.of_job(folder, recorded()[:1])


def is_deleted(app_id: str, folder: JobFolder, components: Sequence[Job]) -> bool:
    """Return whether a job that Slurm still remembers was deleted (``folder.delete``) through this state directory.

    `torchx delete` waits for the job's end, so the folder of a job that lives was removed by another program.

    Args:
        app_id: id of the job or the array.
        folder: its folder.
        components: Slurm's records of it.
    """
    return folders.is_removed(app_id, folder) and not any(job.is_live for job in components)


def folder_of(app_id: str) -> JobFolder | None:
    """Return the folder of an app, or of an array task, of this state directory; None if there is no such folder."""
    parts = array.split(app_id)
    folder = folders.find(parts[0]) if parts else None
    return folder.task(parts[1]) if folder and parts and parts[1] is not None else folder


def has_recorded_end(folder: JobFolder) -> bool:
    """Whether the batch step's record, or that of every array task, has an end time. Slurm's state takes precedence."""
    if not os.path.isdir(folder.array):
        return job_state.has_recorded_end(folder)
    indices = records.read_submission(folder).tasks
    # Check the last task first: it usually ends last.
    return bool(indices) and all(job_state.has_recorded_end(folder.task(index)) for index in reversed(indices))


# -- the app -----------------------------------------------------------------------------------------------------------


def submitted(folder: JobFolder) -> SubmittedApp | None:
    """Read the submitted app; return None if app.json is missing, damaged or holds an impossible app."""
    found = submitted_app.load(folder.app, folder.trusted)
    for spec in found.roles if found else ():
        try:
            state_files.path_name(spec.name)
        except UnicodeEncodeError:
            return None
        # The file may be damaged, and this decides how many records are read.
        if not 0 <= spec.replicas <= MOST_REPLICAS:
            return None
    return found


def of_app(app_id: str, job: JobState, *, brief: bool) -> SlurmSnapshot:
    """Return the snapshot of an app.

    Args:
        app_id: the id of the job, the array or the array task.
        job: its state.
        brief: leave out what the records of the replicas hold.
    """
    app = submitted(job.folder)
    # Without app.json, each component of the job is shown as a role.
    components = job.components[:1] if job.tasks else job.components
    specs = app.roles if app else [RoleSpec(f"{one.name}-{k}" if k else one.name) for k, one in enumerate(components)]
    runs = [_run(one, specs, brief) for one in (job.tasks.values() or [job])]
    roles, outcome = runs[0], job.outcome
    if job.tasks:
        roles = [_concatenated(spec, [run[at] for run in runs]) for at, spec in enumerate(specs)]
        first = array_state.first_failed(job.tasks) if job.state is State.FAILED else None
        if first is not None and not brief:
            task = job.tasks[first]
            error = reduce(AppSnapshot("", "", runs[list(job.tasks).index(first)], native=task.outcome)).error
            outcome = replace(outcome, error=prefix_message(error, f"array task {first}: "))
    name = app.app.name if app else components[0].name if components else app_id
    restarts = None if brief else sum(_restarts(one) for one in (job.tasks.values() or [job]))
    if restarts is not None:
        restarts += sum(replica.restarts for role in roles for replica in role.replicas)
    return SlurmSnapshot(
        app_id=app_id,
        name=name,
        roles=roles,
        app=app.app if app else None,
        created=job.folder.submitted,
        started=first_start(job),
        grace=records.read_submission(job.folder).grace,
        native=outcome,
        is_supervised=True,
        restarts=restarts,
        ui_url=f"file://{job.folder.root}",
        job=job,
    )


def first_start(job: JobState) -> float:
    """Return when a job, or the first task of an array, first ran, in seconds since the epoch; 0 if unknown."""
    runs = job.tasks.values() or [job]
    return min((one.record.started for one in runs if one.record and one.record.started), default=0.0)


def _run(job: JobState, specs: Sequence[RoleSpec], brief: bool) -> list[RoleSnapshot]:
    """Return the roles of a job or an array task."""
    return [RoleSnapshot(spec, _replicas(job, spec, index, brief)) for index, spec in enumerate(specs)]


def _replicas(job: JobState, role: RoleSpec, index: int, brief: bool) -> list[ReplicaSnapshot]:
    """Return the replicas of a role from their records.

    Args:
        job: the job or the array task.
        role: the role.
        index: the index of the role's component.
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
    """Count the restarts of a job or an array task, its roles and their ranks; not those of single replicas."""
    now = job.record.restarts if job.record else 0
    if job.components:
        now = max(now, job.components[0].restarts)
    happened, _ = events.read(job.folder.events, below=job.folder.trusted)
    return now + len([event for event in happened if event["kind"] == "rank_restart"])


# -- arrays ------------------------------------------------------------------------------------------------------------


def _concatenated(spec: RoleSpec, runs: Sequence[RoleSnapshot]) -> RoleSnapshot:
    """Return the role of an array, with the replicas of all of its tasks, from the role in each of them."""
    fewest = None if spec.min_replicas is None else spec.min_replicas * len(runs)
    # Each run has spare nodes of its own: that one of them is left over says nothing about another run.
    whole = replace(spec, replicas=spec.replicas * len(runs), min_replicas=fewest, spares=0)
    every = [
        replace(replica, id=position * spec.replicas + replica.id)
        for position, run in enumerate(runs)
        for replica in run.replicas
    ]
    return RoleSnapshot(whole, every)


def prefix_message(error: str, prefix: str) -> str:
    """Return a host's result with a prefix before its reason; unchanged if it has none."""
    result = HostResult.from_text(error)
    return replace(result, reason=prefix + result.reason).to_text() if result.reason else error


def locate_replica(app: SlurmSnapshot, role: str, replica: int) -> tuple[str, JobState, int]:
    """Locate a replica, by its number in the app, in the job or array task that runs it.

    Returns:
        The id of the job or array task, its state, and the replica's number there.
    """
    tasks = app.job.tasks
    if not tasks:
        return app.app_id, app.job, replica
    whole = next(one for one in app.roles if one.spec.name == role)
    position, own = divmod(replica, len(whole.replicas) // len(tasks))
    index = list(tasks)[position]
    return f"{app.app_id}_{index}", tasks[index], own
