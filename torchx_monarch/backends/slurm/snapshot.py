# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compute the snapshot of an app: of a job, of a whole job array, or of an array task (``123_7``).

Slurm's records of an array are incomplete: one record for all waiting tasks, one for each task that has begun, none for
a task that was cancelled before it began, and, after a while, none for a task that has ended. Each array task therefore
has its own folder and snapshot, like a job (``job_status``), and the array's state is derived from those of its tasks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchx.specs import NONE, AppDef, AppState, Role, RoleStatus

from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.local import appdef, state_files
from torchx_monarch.backends.slurm import array, commands, job_status, records, states
from torchx_monarch.backends.slurm import folder as folders
from torchx_monarch.backends.slurm.commands import Job, SlurmError
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.job_status import TERMINAL, SlurmSnapshot
from torchx_monarch.backends.slurm.records import BatchRecord, EndRecord, RunEnd, Submission
from torchx_monarch.model import job_result

_MOST_REPLICAS = 1 << 16
"""Limit on the replicas of a role in app.json, which may be damaged: it decides how many records are read."""


def look(app_id: str) -> SlurmSnapshot | None:
    """Return the snapshot of an app; None if no app of this scheduler has this id.

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
    end = records.read(EndRecord, folder.end) if folder else None
    try:
        components = [job for job in commands.live_job(leader) if job.leader == leader]
    except SlurmError:
        if end is None:
            raise
        components = []  # end.json has the final state
    if components:
        # Slurm reuses job ids, and clusters may share a home directory: the job's comment takes precedence.
        folder = folders.noted(components[0].comment) or folder
    if folder is None or components and folders.is_deleted(leader, folder):
        return None
    # Another user's comment may name a folder of this user: nothing is written there.
    other_user = next((job.other_user for job in components if job.other_user), "")
    whole = known(folder, components, lambda: commands.recorded_job(leader), save=not other_user)
    found = whole if index is None else whole.tasks.get(index)
    return found and replace(found, other_user=other_user)


def look_own(app_id: str) -> SlurmSnapshot | None:
    """Return the snapshot of an app for an operation that changes it; None if no app of this scheduler has this id.

    Raises:
        UserError: the job belongs to another user, whose comment on it may name any folder.
        SlurmError: as ``look``.
    """
    app = look(app_id)
    if app is not None and app.other_user:
        raise UserError(
            f"job {app_id} belongs to another user, {app.other_user}: only that user can cancel or delete it by torchx"
        )
    return app


def folder_of(app_id: str) -> JobFolder | None:
    """Return the folder of an app, or of an array task, of this state directory; None if there is no such folder."""
    parts = array.split(app_id)
    folder = folders.find(parts[0]) if parts else None
    return folder.task(parts[1]) if folder and parts and parts[1] is not None else folder


def has_recorded_end(folder: JobFolder) -> bool:
    """Whether the batch step's record, or that of every array task, has an end time. Slurm's state takes precedence."""
    if not os.path.isdir(folder.array):
        return _has_said_that_it_ended(folder)
    submission = records.read(Submission, folder.request)
    indices = submission.tasks if submission else []
    # Check the last task first: it usually ends last.
    return bool(indices) and all(_has_said_that_it_ended(folder.task(index)) for index in reversed(indices))


def _has_said_that_it_ended(run: JobFolder) -> bool:
    record = records.read(BatchRecord, run.job)
    return record is not None and record.ended is not None


def submitted(folder: JobFolder) -> AppDef | None:
    """Read the submitted app; return None if app.json is missing, damaged or holds an impossible app."""
    found = appdef.load(folder.app)
    if found is None:
        return None
    for role in found.app.roles:
        try:
            state_files.path_name(role.name)
        except UnicodeEncodeError:
            return None
        if not 0 <= role.num_replicas < _MOST_REPLICAS:
            return None
    return found.app


def known(
    folder: JobFolder, components: list[Job], recorded: Callable[[], list[Job]], save: bool = True
) -> SlurmSnapshot:
    """Compute the snapshot of a job or an array from Slurm's records and the files in its folder.

    Args:
        folder: the folder of the job or the array.
        components: Slurm's records; empty if Slurm has forgotten the job.
        recorded: queries the accounting database for more records; called only if they are needed.
        save: whether to save a final state in end.json.
    """
    submission = records.read(Submission, folder.request)
    indices = submission.tasks if submission else []
    if not indices:
        indices = sorted({*folder.begun_tasks(), *(index for job in components for index in job.tasks)})
    if indices:
        return _of_array(folder, indices, components, recorded, save)
    if components:
        return job_status.known(folder, components, save)
    return _ended(folder, records.read(EndRecord, folder.end)) or job_status.known(folder, recorded()[:1], save)


def _ended(folder: JobFolder, end: RunEnd | None) -> SlurmSnapshot | None:
    if end is None:
        return None
    return SlurmSnapshot(folder, AppState[end.state], end.msg, end.nodes, record=records.read(BatchRecord, folder.job))


# -- arrays ------------------------------------------------------------------------------------------------------------


def _of_array(
    folder: JobFolder,
    indices: Sequence[int],
    components: list[Job],
    recorded: Callable[[], list[Job]],
    save: bool,
) -> SlurmSnapshot:
    jobs = by_task(components)
    end = records.read(EndRecord, folder.end)
    noted = end.tasks if end else {}
    accounts: dict[int, Job] | None = None
    tasks: dict[int, SlurmSnapshot] = {}
    for index in indices:
        part, job = folder.task(index), jobs.get(index)
        if job is None:
            if ended := _ended(part, records.read(EndRecord, part.end) or noted.get(str(index))):
                tasks[index] = ended
                continue
            if accounts is None:
                # The accounting database may report a task that was cancelled before it began as PENDING forever.
                accounts = by_task(
                    one for one in recorded() if not components or states.app_state(one.state) in TERMINAL
                )
            job = accounts.get(index)
        tasks[index] = job_status.known(part, [job] if job else [], save)
        if job is None and components and not tasks[index].record and not tasks[index].damage:
            tasks[index] = replace(tasks[index], msg="cancelled before it had started")
    state, msg = array_state(folder, tasks)
    found = SlurmSnapshot(folder, state, msg, components=components, tasks=tasks)
    if save and found.terminal and all(task.is_settled for task in tasks.values()):
        # Array tasks that never ran have no folder for an end.json.
        ends = {str(index): {"state": one.state.name, "msg": one.msg} for index, one in tasks.items() if not one.record}
        job_status.note_end(folder, {"state": state.name, "msg": msg, "tasks": ends})
    return found


def by_task(jobs: Iterable[Job]) -> dict[int, Job]:
    """Index Slurm's records by array task. The record of a single task overrides one of several waiting tasks."""
    ordered = sorted(jobs, key=lambda job: -len(job.tasks))
    return {index: job for job in ordered for index in job.tasks}


def array_state(folder: JobFolder, tasks: Mapping[int, SlurmSnapshot]) -> tuple[AppState, str]:
    """Derive the state of an array and a message on it from its tasks.

    The array ends when all of its tasks have ended: FAILED if any failed, else CANCELLED if any was cancelled, else
    SUCCEEDED. Until then it is RUNNING if any task is running, else PENDING.

    Args:
        folder: the array's folder.
        tasks: the snapshots of its tasks, by index.

    Returns:
        The state, and the message; empty if all tasks have succeeded.
    """
    states_of = [task.state for task in tasks.values()]
    if not TERMINAL.issuperset(states_of):
        order = (AppState.RUNNING, AppState.PENDING, AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)
        counts = [f"{states_of.count(state)} {state.name.lower()}" for state in order if state in states_of]
        waits = next((task.msg for task in tasks.values() if task.state is AppState.PENDING and task.msg), "")
        state = next((state for state in order[:2] if state in states_of), AppState.UNKNOWN)
        return state, f"array tasks: {', '.join(counts)}" + (f" ({waits})" if waits else "")
    first = first_failed(tasks)
    if first is not None:
        more = states_of.count(AppState.FAILED) - 1
        said = f"array task {first}: {tasks[first].msg}"
        return AppState.FAILED, f"{said} ({more} more of {len(tasks)} failed)" if more else said
    for index, task in tasks.items():
        if task.state is AppState.CANCELLED:
            return AppState.CANCELLED, "cancelled" if folder.is_cancelled else f"array task {index}: {task.msg}"
    return AppState.SUCCEEDED, ""


def first_failed(tasks: Mapping[int, SlurmSnapshot]) -> int | None:
    """Return the index of the first array task to fail, None if none failed; unknown end times sort last."""
    failed = [(_ended_at(task), index) for index, task in tasks.items() if _has_failed(task)]
    return min(failed)[1] if failed else None


def _ended_at(task: SlurmSnapshot) -> float:
    """Return when an array task ended, in seconds since the epoch; infinity if unknown."""
    ended = task.record.ended if task.record else None
    return float("inf") if ended is None else ended


def _has_failed(task: SlurmSnapshot) -> bool:
    return task.state is AppState.FAILED


# -- for describe and log ----------------------------------------------------------------------------------------------


def report(app: SlurmSnapshot, roles: Sequence[Role]) -> tuple[list[RoleStatus], int, str]:
    """Return the status of the roles, the number of restarts, and the root cause as JSON text.

    Args:
        app: the app's snapshot.
        roles: the roles of the submitted app.

    Returns:
        The status of each role with its replicas; how often anything was restarted; the content of the root cause's
        error file, ``torchx.specs.NONE`` if the app has not failed or left no error.
    """
    if app.tasks:
        return _report_array(app, roles)
    statuses, by_role = [], {}
    for index, role in enumerate(roles):
        status, by_role[role.name] = job_status.replicas(app, role.name, index, role.num_replicas)
        statuses.append(status)
    cause = job_status.root_cause(app, by_role) if _has_failed(app) else NONE
    return statuses, job_status.restarts(app, by_role), cause


def _report_array(app: SlurmSnapshot, roles: Sequence[Role]) -> tuple[list[RoleStatus], int, str]:
    statuses = [RoleStatus(role.name, []) for role in roles]
    restarts, causes = 0, {}
    for position, (index, task) in enumerate(app.tasks.items()):
        theirs, again, causes[index] = report(task, roles)
        restarts += again
        for status, of_task, role in zip(statuses, theirs, roles, strict=True):
            status.replicas += [replace(one, id=position * role.num_replicas + one.id) for one in of_task.replicas]
    first = first_failed(app.tasks) if _has_failed(app) else None
    return statuses, restarts, NONE if first is None else prefix_message(causes[first], f"array task {first}: ")


def prefix_message(error: str, prefix: str) -> str:
    """Return an error file's content with a prefix before its message; unchanged if it is not a JSON object."""
    data = dict(job_result.read_error_file(error))
    if not data:
        return error
    holder: dict[str, Any] = data
    while isinstance(holder.get("message"), dict):
        holder = holder["message"]
    holder["message"] = f"{prefix}{holder.get('message', '')}"
    return json.dumps(data)


def locate_replica(app_id: str, app: SlurmSnapshot, replica: int, replicas: int) -> tuple[str, SlurmSnapshot, int]:
    """Locate a replica in the job or array task that runs it.

    Args:
        app_id: the app's id.
        app: its snapshot.
        replica: the replica's number in the app.
        replicas: how many replicas its role has in one job or array task.

    Returns:
        The id of the job or array task, its snapshot, and the replica's number there.
    """
    if not app.tasks:
        return app_id, app, replica
    position, own = divmod(replica, replicas)
    index = list(app.tasks)[position]
    return f"{app_id}_{index}", app.tasks[index], own
