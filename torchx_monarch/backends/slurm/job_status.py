# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compute the snapshot of a job or an array task from Slurm's records and the files in the job's folder.

Slurm forgets a job some time after its end; from then on the files alone count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchx.specs import NONE, AppState, ReplicaStatus, RoleStatus

from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.slurm import commands, records, states
from torchx_monarch.backends.slurm.commands import Job
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.records import BatchRecord, SlurmReplica
from torchx_monarch.insight import events
from torchx_monarch.model import job_result

TERMINAL = frozenset({AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED})


@dataclass(frozen=True)
class SlurmSnapshot:
    """The state of a job, an array or an array task at one time.

    Attributes:
        folder: its folder; may not exist if it is on another machine.
        state: TorchX's state.
        msg: a message for the user: why it waits or why it ended; may be empty.
        nodes: node list of each component; empty before nodes are assigned.
        components: Slurm's records; empty if Slurm has forgotten the job.
        record: the batch step's record (job.json); None if it is missing or damaged.
        damage: what is wrong with job.json; empty if it is sound or missing.
        tasks: for an array, the snapshot of each task by index, in ascending order; empty otherwise.
        other_user: name of the job's owner if that is another user; else empty.
    """

    folder: JobFolder
    state: AppState
    msg: str
    nodes: list[str] = field(default_factory=list)
    components: list[Job] = field(default_factory=list)
    record: BatchRecord | None = None
    damage: str = ""
    tasks: Mapping[int, SlurmSnapshot] = field(default_factory=dict)
    other_user: str = ""

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def is_settled(self) -> bool:
        """Whether a terminal state is final.

        While Slurm cleans up the nodes (COMPLETING) it may still report another state, and once Slurm has forgotten the
        job, a damaged job.json may still be restored.
        """
        if not self.components:
            return not self.damage
        return states.word(self.components[0].state) != "COMPLETING"

    @property
    def runs_in_slurm(self) -> bool:
        """Whether Slurm reports it as waiting or running, regardless of its files."""
        return any(
            states.app_state(one.state) not in TERMINAL and states.word(one.state) != "COMPLETING"
            for one in self.components
        )


def known(folder: JobFolder, components: list[Job], save: bool = True) -> SlurmSnapshot:
    """Compute the snapshot of a job or an array task.

    Args:
        folder: the folder of the job or the array task.
        components: Slurm's records; empty if Slurm has forgotten the job.
        save: whether to save a final state in end.json.
    """
    record, damage = records.checked(BatchRecord, folder.job)
    cancelled = folder.is_cancelled
    job = components[0] if components else None
    state, msg = derive_state(job, record, cancelled, damage)
    if damage and damage not in msg:
        msg = f"{msg}; {damage}" if msg else damage
    elif state is AppState.FAILED and record is None and not damage and os.path.isdir(folder.whole.root):
        msg += f"; it has written no record to {folder.root}: do all nodes see that folder (run option job_dir)?"
    nodes = [one.nodes for one in components if one.nodes] or (record.nodes if record else [])
    found = SlurmSnapshot(folder, state, msg, nodes, components, record, damage)
    if save and found.terminal and found.is_settled:
        note_end(folder, {"state": state.name, "msg": msg, "nodes": nodes})
    return found


def note_end(folder: JobFolder, end: Mapping[str, Any]) -> None:
    """Save the final state in end.json, for when Slurm has forgotten the job.

    Args:
        folder: the folder; nothing is saved if it does not exist.
        end: the content, as ``records.EndRecord`` reads it.
    """
    if not os.path.isdir(folder.root) or state_files.read_json(folder.end) == end:
        return
    with contextlib.suppress(OSError):  # another user's folder, or a full disk: the next call tries again
        state_files.write_json(folder.end, end)


def derive_state(
    job: Job | None, record: BatchRecord | None, cancelled: bool, damage: str = ""
) -> tuple[AppState, str]:
    """Derive the state of a job and a message on it.

    Args:
        job: Slurm's record; None if Slurm has forgotten the job.
        record: the batch step's record; None if it is missing or damaged.
        cancelled: whether this scheduler has cancelled the job.
        damage: what is wrong with the batch step's record; empty if it is sound or missing.

    Returns:
        The state, and the message; empty if there is nothing to add to the state.
    """
    ours = AppState[record.state] if record and record.state else None
    said = record.msg if record else ""
    if job is None:
        if ours is not None:
            return ours, said
        if cancelled:
            return AppState.CANCELLED, "cancelled"
        if damage:
            return AppState.FAILED, f"how it ended is lost: {damage}"
        if record:
            return AppState.FAILED, "Slurm has forgotten the job, and it was killed before it recorded how it ended"
        return AppState.CANCELLED, "Slurm has forgotten the job, which had not started: scancel, or a start that failed"
    state = states.app_state(job.state)
    if state is AppState.RUNNING and ours is not None and not (record and record.outside):
        return ours, said  # Slurm cleans up the nodes, or its database lags behind
    reason = states.explanation(job.state, job.reason)
    if cancelled and (state is AppState.CANCELLED or state is AppState.FAILED and ours is not AppState.FAILED):
        return AppState.CANCELLED, "cancelled"
    if state is not AppState.FAILED:
        return state, reason
    if states.word(job.state) != "FAILED":
        return state, reason
    return state, said or describe_exit(job.exit_code)


def describe_exit(code: int) -> str:
    """Describe an exit code of the batch script; -N means signal N."""
    return f"the job's script was killed by signal {-code}" if code < 0 else f"the job's script exited with code {code}"


def replicas(app: SlurmSnapshot, role: str, index: int, count: int) -> tuple[RoleStatus, list[SlurmReplica]]:
    """Read the status of one role's replicas.

    Args:
        app: the job's snapshot.
        role: the role's name.
        index: the index of the role's component.
        count: how many replicas it has.

    Returns:
        The status of the role, and the records of the replicas that have one.
    """
    now = app.record.role_restarts.get(role, 0) if app.record else 0
    every = [records.read_replica(app.folder.record(role, replica)) for replica in range(count)]
    all_say = all(record is not None and record.job_restart == now for record in every)
    hosts = commands.hostnames(app.nodes[index]) if index < len(app.nodes) and not all_say else []
    found = []
    for replica, record in enumerate(every):
        stale = record is not None and record.job_restart != now
        state = _replica_state(app, record, stale)
        hostname = record.hostname if record and (not stale or app.terminal) else ""
        error = record.error if record and state in TERMINAL else None
        found.append(
            ReplicaStatus(
                id=replica,
                state=state,
                role=role,
                hostname=hostname or (hosts[replica] if replica < len(hosts) else ""),
                structured_error_msg=error or NONE,
            )
        )
    return RoleStatus(role, found), [record for record in every if record is not None]


def _replica_state(app: SlurmSnapshot, record: SlurmReplica | None, stale: bool) -> AppState:
    if app.state is AppState.PENDING:
        return AppState.PENDING
    if app.terminal:
        state = AppState[record.state] if record else app.state
        return state if state in TERMINAL else app.state
    if record is None or stale:
        return AppState.PENDING
    return AppState[record.state]


def root_cause(app: SlurmSnapshot, by_role: Mapping[str, list[SlurmReplica]]) -> str:
    """Return the error file of the first replica to fail in the role that failed the job, as JSON text.

    Args:
        app: the job's snapshot.
        by_role: the replicas' records, by role name.

    Returns:
        The error; ``torchx.specs.NONE`` if no failed replica has one.
    """
    decided = app.record.role if app.record else None
    failed = [
        (one.error, one.ended or 0.0)
        for role, ones in by_role.items()
        if decided in (None, role)
        for one in ones
        if one.state == AppState.FAILED.name and one.error
    ]
    # An error file that the program wrote (its message is an object) tells more than one made from an exit code.
    failed.sort(key=lambda one: (not isinstance(job_result.read_error_file(one[0]).get("message"), dict), one[1]))
    return failed[0][0] if failed else NONE


def restarts(app: SlurmSnapshot, by_role: Mapping[str, list[SlurmReplica]]) -> int:
    """Count the restarts of the job, its roles, its replicas and their ranks.

    Args:
        app: the job's snapshot.
        by_role: the replicas' records, by role name.
    """
    now = app.record.restarts if app.record else 0
    if app.components:
        now = max(now, app.components[0].restarts)
    replaced: int = sum(max(0, one.restarts - one.job_restart) for ones in by_role.values() for one in ones)
    happened, _ = events.read(app.folder.events)
    return now + replaced + len([event for event in happened if event["kind"] == "rank_restart"])
