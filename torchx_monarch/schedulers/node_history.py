# SPDX-License-Identifier: BSD-3-Clause
"""What this user's jobs have met on each machine, from a small record of each ended job in the state directory.

A record is written when a command needs it, and before a job is deleted: its events tell what it has met. So it costs
jobs nothing, and outlives them.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.stored_apps import StoredApps
from torchx_monarch.insight.timeline import Timeline
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.host_facts import NodeFault
from torchx_monarch.schedulers.job_status import timeline_of
from torchx_monarch.schedulers.recorded_apps import recorded_apps

_FOLDER = "nodes"

_KEPT_FOR = 90 * 86400.0
"""Seconds for which records are kept."""

_LAST_JOBS = 5
"""The last jobs on a machine by which it is known to be bad."""

_BAD_JOBS = 2
"""How many of them must have met something there: one failure may have been the program's."""

FAULTS: tuple[NodeFault, ...] = get_args(NodeFault)


@dataclass(frozen=True)
class JobOnNodes:
    """A job that has ended: when, and how often it has met what on each of its machines."""

    ended: Seconds = 0.0
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeHistory:
    """What jobs have met on a machine.

    Attributes:
        jobs: the number of jobs that ran on it.
        faults: how often they have met what, ``in_jobs`` in how many of them.
        last: when the last job that has met something there ended; 0 for none.
        is_bad: whether ``avoid_known_bad`` leaves it out.
    """

    node: str
    jobs: int
    faults: dict[str, int]
    in_jobs: dict[str, int]
    last: float
    is_bad: bool


def record_jobs(scheduler: str, apps: Apps[Any], app_ids: Iterable[str] | None = None) -> None:
    """Write the records of apps that have ended, if they have none; without ids, of all apps of a scheduler."""
    stored, oldest = StoredApps(JobOnNodes, _FOLDER, scheduler), time.time() - _KEPT_FOR
    if app_ids is None:
        app_ids = [app.app_id for app in recorded_apps() if app.scheduler == scheduler and app.submitted > oldest]
    for app_id in {*app_ids} - {*stored.app_ids()}:
        # A damaged file of a job, or a full disk on which it is deleted, costs its record alone.
        with contextlib.suppress(BackendError, OSError):
            found = apps.read(app_id)
            if found is not None and found[1].state.is_terminal:
                job = _job_on_nodes(timeline_of(*found, time.time()))
                if any(role.spec.allocation for role in found[0].roles):
                    job.nodes.clear()  # the job of the allocation has them
                stored.store(app_id, job)


def _job_on_nodes(timeline: Timeline) -> JobOnNodes:
    met = Counter(timeline.node_faults)
    nodes = {span.node for span in timeline.spans_of("rank") if span.node} | {node for node, _ in met}
    job = JobOnNodes(timeline.job.end, {node: {} for node in nodes})
    for (node, fault), count in met.items():
        job.nodes[node][fault] = count
    return job


def read_history(scheduler: str | None = None) -> list[NodeHistory]:
    """Return what the recorded jobs of a scheduler, or of all, have met; machines where most jobs have come first."""
    found: dict[str, list[JobOnNodes]] = defaultdict(list)
    for name in [scheduler] if scheduler else StoredApps(JobOnNodes, _FOLDER).app_ids():
        stored = StoredApps(JobOnNodes, _FOLDER, name)
        for app_id in stored.app_ids():
            job = stored.load(app_id) or JobOnNodes()
            if job.ended < time.time() - _KEPT_FOR:
                stored.remove(app_id)
                continue
            for node in job.nodes:
                found[node].append(job)
    history = [_of_node(node, sorted(jobs, key=lambda job: job.ended)) for node, jobs in found.items()]
    return sorted(history, key=lambda node: (-sum(node.in_jobs.values()), node.node))


def _of_node(name: str, jobs: Sequence[JobOnNodes]) -> NodeHistory:
    met = [job.nodes[name] for job in jobs]
    return NodeHistory(
        name,
        jobs=len(jobs),
        faults=dict(sum(map(Counter, met), Counter[str]())),
        in_jobs=dict(Counter(fault for faults in met for fault in faults)),
        last=max((job.ended for job in jobs if job.nodes[name]), default=0.0),
        is_bad=sum(map(bool, met[-_LAST_JOBS:])) >= _BAD_JOBS,
    )


def known_bad(scheduler: str, apps: Apps[Any]) -> list[str]:
    """Return the machines on which the last jobs of a scheduler have met something again and again."""
    record_jobs(scheduler, apps)
    return sorted(node.node for node in read_history(scheduler) if node.is_bad)
