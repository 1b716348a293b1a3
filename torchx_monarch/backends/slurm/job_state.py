# SPDX-License-Identifier: BSD-3-Clause
"""The state of a job, from Slurm's records and the files in the job's folder.

Slurm forgets a job some time after its end; from then on the files alone count.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.slurm import records, states
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.native import Job
from torchx_monarch.backends.slurm.records import BatchRecord
from torchx_monarch.model import job_result
from torchx_monarch.model.state import State

_EXIT_TIME = 60.0
"""The most seconds from the end time in job.json until Slurm reports the job as COMPLETING. If Slurm still reports it
as RUNNING after that, job.json is wrong."""


@dataclass(frozen=True)
class JobState:
    """The state of a job at one time.

    Attributes:
        folder: its folder; may not exist if it is on another machine.
        outcome: its state and the reason, by Slurm and the batch step; not terminal while it waits or runs.
        nodes: node list of each component; empty before nodes are assigned.
        components: Slurm's records; empty if Slurm has forgotten the job.
        record: the batch step's record (job.json); None if it is missing, or cannot be read while Slurm knows the job.
        other_user: name of the job's owner if that is another user; else empty.
    """

    folder: JobFolder
    outcome: Outcome
    nodes: list[str] = field(default_factory=list)
    components: list[Job] = field(default_factory=list)
    record: BatchRecord | None = None
    other_user: str = ""

    @property
    def state(self) -> State:
        """The state of its outcome."""
        return self.outcome.state

    @property
    def is_live(self) -> bool:
        """Whether it has not ended, or Slurm reports, whatever its files say, that it waits or runs.

        If job.json says that the app has ended but Slurm reports that it runs, the job is about to exit or the file is
        wrong.
        """
        return not self.state.is_terminal or any(component.is_live for component in self.components)


def of_job(folder: JobFolder, components: list[Job]) -> JobState:
    """Return the state of a job.

    Args:
        folder: its folder.
        components: Slurm's records; empty if Slurm has forgotten the job.

    Raises:
        DamagedFileError: job.json is damaged, and Slurm has forgotten the job.
    """
    load = records.read if components else state_files.load
    record = load(BatchRecord, folder.job, folder.trusted)
    outcome = derive_outcome(components[0] if components else None, record, folder.is_cancelled)
    message = outcome.message
    if outcome.state is State.FAILED and record is None and os.path.isdir(folder.root):
        message += f"; it has written no record to {folder.root}: do all nodes see that folder (run option job_dir)?"
    elif outcome.state is State.RUNNING and not os.path.isdir(folder.root):
        message = f"its folder {folder.root} was removed or is not on this machine: details and logs are missing"
    outcome = Outcome(outcome.state, message, time=_end_time(outcome.state, record))
    nodes = [component.nodes for component in components if component.nodes] or (record.nodes if record else [])
    return JobState(folder, outcome, nodes, components, record)


def has_recorded_end(folder: JobFolder) -> bool:
    """Return whether the batch step of a job has recorded its end. Slurm's state takes precedence."""
    record = records.read(BatchRecord, folder.job, folder.trusted)
    return record is not None and record.ended is not None and record.state.is_terminal


def _end_time(state: State, record: BatchRecord | None) -> float:
    """Return when a run in this state has ended, in seconds since the epoch; 0 if that is not recorded."""
    return (record.ended or 0.0) if record is not None and state.is_terminal else 0.0


def derive_outcome(job: Job | None, record: BatchRecord | None, cancelled: bool, now: float | None = None) -> Outcome:
    """Derive the state of a job, and the reason for it, which is empty if there is nothing to add to the state.

    Args:
        job: Slurm's record; None if Slurm has forgotten the job.
        record: the batch step's record; None if it is missing.
        cancelled: whether this scheduler has cancelled the job.
        now: the time in seconds since the epoch; None for the present.
    """
    if record is not None and job is not None and job.restarts > record.requeues:
        record = None  # of the run before: Slurm has restarted the job, whose batch step is yet to begin its record
    recorded_outcome = Outcome(record.state, record.msg) if record and record.state.is_terminal else None
    if job is None:
        if recorded_outcome is not None:
            return recorded_outcome
        if cancelled:
            return Outcome(State.CANCELLED, "cancelled")
        if record:
            reason = "Slurm has forgotten the job, and it was killed before it recorded how it ended"
            return Outcome(State.FAILED, reason)
        reason = "Slurm has forgotten the job, which had not started: scancel, or a start that failed"
        return Outcome(State.CANCELLED, reason)
    state = states.to_state(job.state)
    if state is State.RUNNING and record is not None and recorded_outcome is not None and not record.outside:
        is_exiting = record.ended is not None and abs((now or time.time()) - record.ended) < _EXIT_TIME
        if job.is_accounted or states.word(job.state) == "COMPLETING" or is_exiting:
            return recorded_outcome  # Slurm cleans up the nodes, or its database lags behind
        return Outcome(State.RUNNING, f"job.json says {record.state}, but the job runs, as Slurm reports")
    has_failed = recorded_outcome is not None and recorded_outcome.state is State.FAILED
    if cancelled and (state is State.CANCELLED or state is State.FAILED and not has_failed):
        return Outcome(State.CANCELLED, "cancelled")
    if states.word(job.state) != "FAILED":
        return Outcome(state, states.explanation(job.state, job.reason))
    recorded_message = record.msg if record else ""
    return Outcome(state, recorded_message or f"the job's script {job_result.describe_code(job.exit_code)}")
