# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a job array, from those of its tasks.

Slurm's records of an array are incomplete: one record for all waiting tasks, one for each task that has begun, none for
a task that was cancelled before it began, and, after a while, none for a task that has ended. Each array task therefore
has its own folder and state, like a job (``job_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.slurm import job_state, states
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.job_state import JobState
from torchx_monarch.backends.slurm.native import Job
from torchx_monarch.model.state import State


def of_array(
    folder: JobFolder,
    indices: Sequence[int],
    components: list[Job],
    recorded: Callable[[], list[Job]],
) -> JobState:
    """Return the state of an array.

    Args:
        folder: its folder.
        indices: the indices of its tasks, in ascending order.
        components: Slurm's records; empty if Slurm has forgotten the array.
        recorded: queries the accounting database for more records; called only if they are needed.
    """
    jobs = by_task(components)
    accounts: dict[int, Job] | None = None
    tasks: dict[int, JobState] = {}
    for index in indices:
        part, job = folder.task(index), jobs.get(index)
        if job is None and not job_state.has_recorded_end(part):
            if accounts is None:
                # The accounting database may report a task that was cancelled before it began as PENDING forever.
                accounts = by_task(
                    one for one in recorded() if not components or states.to_state(one.state).is_terminal
                )
            job = accounts.get(index)
        task = job_state.of_job(part, [job] if job else [])
        if job is None and components and not task.record and not task.damage:
            task = replace(task, outcome=Outcome(task.state, "cancelled before it had started"))
        tasks[index] = task
    return JobState(folder, derive_outcome(folder, tasks), components=components, tasks=tasks)


def by_task(jobs: Iterable[Job]) -> dict[int, Job]:
    """Index Slurm's records by array task. The record of a single task overrides one of several waiting tasks."""
    ordered = sorted(jobs, key=lambda job: -len(job.tasks))
    return {index: job for job in ordered for index in job.tasks}


def derive_outcome(folder: JobFolder, tasks: Mapping[int, JobState]) -> Outcome:
    """Derive the state of an array, and the reason for it, which is empty if all tasks have succeeded.

    The array ends when all of its tasks have ended: FAILED if any failed, else CANCELLED if any was cancelled, else
    SUCCEEDED. Until then it is RUNNING if any task is running, else PENDING.
    """
    states_of = [task.state for task in tasks.values()]
    if not all(state.is_terminal for state in states_of):
        order = (State.RUNNING, State.PENDING, State.SUCCEEDED, State.FAILED, State.CANCELLED)
        counts = [f"{states_of.count(state)} {state.lower()}" for state in order if state in states_of]
        reasons = (task.outcome.message for task in tasks.values() if task.state is State.PENDING)
        waits = next(filter(None, reasons), "")
        state = next((state for state in order[:2] if state in states_of), State.UNKNOWN)
        return Outcome(state, f"array tasks: {', '.join(counts)}" + (f" ({waits})" if waits else ""))
    first = first_failed(tasks)
    if first is not None:
        more = states_of.count(State.FAILED) - 1
        first_failure = f"array task {first}: {tasks[first].outcome.message}"
        return Outcome(State.FAILED, f"{first_failure} ({more} more of {len(tasks)} failed)" if more else first_failure)
    for index, task in tasks.items():
        if task.state is State.CANCELLED:
            reason = "cancelled" if folder.is_cancelled else f"array task {index}: {task.outcome.message}"
            return Outcome(State.CANCELLED, reason)
    return Outcome(State.SUCCEEDED)


def first_failed(tasks: Mapping[int, JobState]) -> int | None:
    """Return the index of the first array task to fail, None if none failed; unknown end times sort last."""
    failed = [(_ended_at(task), index) for index, task in tasks.items() if task.state is State.FAILED]
    return min(failed)[1] if failed else None


def _ended_at(task: JobState) -> float:
    """Return when an array task ended, in seconds since the epoch; infinity if unknown."""
    ended = task.record.ended if task.record else None
    return float("inf") if ended is None else ended
