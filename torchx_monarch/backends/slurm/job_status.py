# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is known of a job, or of one array task: what Slurm says while it remembers, and then what the job and its
watchers have written."""

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
from torchx_monarch.backends.slurm.records import BatchRecord, ReplicaRecord
from torchx_monarch.insight import events
from torchx_monarch.model import job_result

TERMINAL = frozenset({AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED})


@dataclass(frozen=True)
class SlurmSnapshot:
    """What is known of one job, of one array task, or of an array.

    Attributes:
        folder: of the job; a folder of another machine's may not be there.
        state: TorchX's.
        msg: for a person: what it waits for, why it ended.
        nodes: node list of each component; empty while it has none.
        components: as Slurm has them; empty when it has forgotten the job.
        record: what the batch step has written; None when it has not, or when that is damaged.
        damage: what is wrong with the file of that record; empty where nothing is.
        tasks: of an array what is known of each task, by index, in ascending order.
    """

    folder: JobFolder
    state: AppState
    msg: str
    nodes: list[str] = field(default_factory=list)
    components: list[Job] = field(default_factory=list)
    record: BatchRecord | None = None
    damage: str = ""
    tasks: Mapping[int, SlurmSnapshot] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def is_settled(self) -> bool:
        """Whether an end that is known will stay as it is.

        While nodes are being cleaned up Slurm may state another one, and a damaged file may be restored.
        """
        if not self.components:
            return not self.damage
        return states.word(self.components[0].state) != "COMPLETING"

    @property
    def runs_in_slurm(self) -> bool:
        """Whether Slurm has it waiting or running, whatever its files say."""
        return any(
            states.app_state(one.state) not in TERMINAL and states.word(one.state) != "COMPLETING"
            for one in self.components
        )


def known(folder: JobFolder, components: list[Job]) -> SlurmSnapshot:
    """Put together what Slurm says and what the job's folder holds; an end is noted there for when Slurm has forgotten.

    Args:
        folder: the job's.
        components: as Slurm has them; empty when it has forgotten the job.
    """
    record, damage = records.checked(BatchRecord, folder.job)
    cancelled = folder.is_cancelled
    job = components[0] if components else None
    state, msg = decide(job, record, cancelled, damage)
    if damage and damage not in msg:
        msg = f"{msg}; {damage}" if msg else damage
    elif state is AppState.FAILED and record is None and not damage and os.path.isdir(folder.whole.root):
        msg += f"; it has left no word in {folder.root}: do all nodes see that folder (run option job_dir)?"
    nodes = [one.nodes for one in components if one.nodes] or (record.nodes if record else [])
    found = SlurmSnapshot(folder, state, msg, nodes, components, record, damage)
    if found.terminal and found.is_settled:
        note_end(folder, {"state": state.name, "msg": msg, "nodes": nodes})
    return found


def note_end(folder: JobFolder, end: Mapping[str, Any]) -> None:
    """Keep how it has ended, for when Slurm has forgotten."""
    if not os.path.isdir(folder.root) or state_files.read_json(folder.end) == end:
        return
    with contextlib.suppress(OSError):  # another user's job, or a full disk: Slurm is asked again the next time
        state_files.write_json(folder.end, end)


def decide(job: Job | None, record: BatchRecord | None, cancelled: bool, damage: str = "") -> tuple[AppState, str]:
    """The state of a job, and a word on it.

    Args:
        job: Slurm's word; None when it has forgotten the job.
        record: the batch step's; None without one that can be read.
        cancelled: whether its end was asked for through us.
        damage: why the batch step's cannot be read; empty where it can be, or where there is none.
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
            return AppState.FAILED, "Slurm has forgotten the job, and it was killed before it could say how it ended"
        return AppState.CANCELLED, "Slurm has forgotten the job, which had not started: scancel, or a start that failed"
    state = states.app_state(job.state)
    if state is AppState.RUNNING and ours is not None and not (record and record.outside):
        return ours, said  # the nodes are being cleaned up, or the database lags behind
    reason = states.explanation(job.state, job.reason)
    if cancelled and (state is AppState.CANCELLED or state is AppState.FAILED and ours is not AppState.FAILED):
        return AppState.CANCELLED, "cancelled"
    if state is not AppState.FAILED:
        return state, reason
    if states.word(job.state) != "FAILED":
        return state, reason
    return state, said or commands_code(job.exit_code)


def commands_code(code: int) -> str:
    """An exit code of the batch script in words."""
    return f"the job's script was killed by signal {-code}" if code < 0 else f"the job's script exited with code {code}"


def replicas(app: SlurmSnapshot, role: str, index: int, count: int) -> tuple[RoleStatus, list[ReplicaRecord]]:
    """The replicas of one role, and the records that they have.

    Args:
        app: its job.
        role: its name.
        index: which component it is.
        count: how many replicas it has.
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


def _replica_state(app: SlurmSnapshot, record: ReplicaRecord | None, stale: bool) -> AppState:
    if app.state is AppState.PENDING:
        return AppState.PENDING
    if app.terminal:
        state = AppState[record.state] if record else app.state
        return state if state in TERMINAL else app.state
    if record is None or stale:
        return AppState.PENDING
    return AppState[record.state]


def root_cause(app: SlurmSnapshot, by_role: Mapping[str, list[ReplicaRecord]]) -> str:
    """The error that decided the end, as JSON text: of the first replica to fail in the role that failed."""
    decided = app.record.role if app.record else None
    failed = [
        (one.error, one.ended or 0.0)
        for role, ones in by_role.items()
        if decided in (None, role)
        for one in ones
        if one.state == AppState.FAILED.name and one.error
    ]
    # What an error file has said tells more than an exit code.
    failed.sort(key=lambda one: (not isinstance(job_result.read_error_file(one[0]).get("message"), dict), one[1]))
    return failed[0][0] if failed else NONE


def restarts(app: SlurmSnapshot, by_role: Mapping[str, list[ReplicaRecord]]) -> int:
    """How often the job, a role, a replica or the ranks were started again."""
    now = app.record.restarts if app.record else 0
    if app.components:
        now = max(now, app.components[0].restarts)
    replaced: int = sum(max(0, one.restarts - one.job_restart) for ones in by_role.values() for one in ones)
    happened, _ = events.read(app.folder.events)
    return now + replaced + len([event for event in happened if event["kind"] == "rank_restart"])
