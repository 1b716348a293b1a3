# SPDX-License-Identifier: BSD-3-Clause
"""Convert Batch's descriptions of a job and its nodes to the snapshot of an app. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchx_monarch.backends.aws_batch import request
from torchx_monarch.backends.aws_batch.request import APP_PARAMETER, TAG_APP
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import describe_shell_code
from torchx_monarch.model.state import State
from torchx_monarch.system import error_files

CANCELLED = "cancelled through torchx"
"""The reason given to TerminateJob. It marks a job as cancelled, for which Batch has no state but FAILED."""

_FORGOTTEN = "AWS Batch has forgotten the job, as it does a week after its end; only the job definition is left"

_STATES = {
    **dict.fromkeys(("SUBMITTED", "PENDING", "RUNNABLE", "STARTING"), State.PENDING),
    "RUNNING": State.RUNNING,
    "SUCCEEDED": State.SUCCEEDED,
    "FAILED": State.FAILED,
}

Results = Mapping[int, Sequence[str]]
"""The signed result in the log of each attempt of a node, by node index; empty for an attempt that has logged none."""

_GENERIC_REASONS = ("Essential container in task exited", "Task failed to start")
"""Beginnings of status reasons that give no cause; another field of the job gives it."""


@dataclass(frozen=True)
class AwsSnapshot(AppSnapshot):
    """The state of an app at one time.

    Attributes:
        job: Batch's description of the job; that of its definition if Batch has forgotten the job.
        nodes: Batch's description of each node that it knows, by node index.
    """

    job: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def state(job: Mapping[str, Any]) -> State:
    """Return the state of a job or a node from Batch's description; UNKNOWN for a job definition."""
    found = _STATES.get(job.get("status", ""), State.UNKNOWN)
    if found is State.FAILED and str(job.get("statusReason", "")).startswith(CANCELLED):
        return State.CANCELLED
    return found


def first_failed(nodes: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the index of the node that failed first; -1 if none has failed."""
    failed = [index for index, node in nodes.items() if state(node) is State.FAILED]
    return min(failed, key=lambda index: (nodes[index].get("stoppedAt", float("inf")), index), default=-1)


def app_snapshot(
    app_id: str, job: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]], results: Results
) -> AwsSnapshot:
    """Return the snapshot of an app; ``results`` is empty in a brief one, and before the end of the job."""
    submitted = None
    if word := job.get("parameters", {}).get(APP_PARAMETER):  # a definition has none
        submitted = SubmittedApp.unpack(word, f"the parameter {APP_PARAMETER} of {app_id}")
    roles, index = [], 0
    for spec in submitted.roles if submitted else ():
        replicas = []
        for replica in range(spec.replicas):
            error = error_files.cleaned(results[index][-1]) if results.get(index) else ""
            replicas.append(_replica(spec.name, replica, job, nodes.get(index), error))
            index += 1
        roles.append(RoleSnapshot(spec, replicas))
    starts = [attempt["startedAt"] for attempt in [*job.get("attempts", ()), job] if attempt.get("startedAt")]
    # Each attempt of the main node's host logs how often it has restarted the ranks.
    ranks = sum(HostResult.from_text(text).rank_restarts for text in results.get(0, ()))
    return AwsSnapshot(
        app_id,
        job.get("tags", {}).get(TAG_APP) or app_id.rpartition(":")[2],
        roles,
        app=submitted.app if submitted else None,
        created=job.get("createdAt", 0) / 1000,
        started=min(starts, default=0) / 1000,
        native=replace(_outcome(job, nodes), time=job.get("stoppedAt", 0) / 1000),
        restarts=_restarts(job) + ranks,
        ui_url=console_url(job.get("jobArn", ""), "nodeProperties" in job),
        job=job,
        nodes=nodes,
    )


def _outcome(job: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]]) -> Outcome:
    """Return the state of a job, and why it is in it unless a node's failure says that."""
    now, reason = state(job), str(job.get("statusReason", ""))
    if "jobId" not in job:
        return Outcome(now, _FORGOTTEN)
    if now is State.PENDING and reason:
        return Outcome(now, f"{job['status']}: {reason}")
    if now is State.CANCELLED:
        return Outcome(now, CANCELLED)
    if now is State.FAILED and first_failed(nodes) < 0:
        return Outcome(now, reason)
    return Outcome(now)


def _replica(
    role: str, replica: int, job: Mapping[str, Any], node: Mapping[str, Any] | None, error: str
) -> ReplicaSnapshot:
    """Return the snapshot of a replica; ``error`` is its host's result, if the log has it."""
    if node is None:
        return ReplicaSnapshot(role, replica, State.PENDING)  # Batch does not know its node yet
    container = container_of(node)
    # Batch reports no address of a container on its host's network.
    address = str((container.get("networkInterfaces") or [{}])[0].get("privateIpv4Address", ""))
    has_failed = state(node) is State.FAILED
    return ReplicaSnapshot(
        role,
        replica,
        state(node),
        hostname=address,
        address=address,
        started=node.get("startedAt", 0) / 1000,
        ended=node.get("stoppedAt", 0) / 1000,
        exit_code=container.get("exitCode"),
        failure=f"replica {role}/{replica} {_failure(node, job)}" if has_failed else "",
        error=error if has_failed else "",
    )


def _restarts(job: Mapping[str, Any]) -> int:
    ended = sum("stoppedAt" in attempt for attempt in job.get("attempts", ()))
    return max(0, ended - 1) if state(job).is_terminal else ended


def streams(job: Mapping[str, Any], node: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the CloudWatch streams of a job's node as (group, stream), one for each attempt, in order."""
    found = [attempt.get("container", {}).get("logStreamName") for attempt in node.get("attempts", ())]
    found.append(node.get("container", {}).get("logStreamName"))
    return [(request.log_group(job), stream) for stream in dict.fromkeys(found) if stream]


def console_url(arn: str, multinode: bool = False) -> str:
    """Return the URL of a job's page in the AWS console; empty for a job of a partition with another console."""
    found = re.fullmatch(r"arn:aws:batch:([a-z0-9-]+):\d*:job/([a-zA-Z0-9-]+)", arn)
    if found is None:
        return ""
    region, job_id = found.groups()
    kind = "mnp-job" if multinode else "detail"
    return f"https://{region}.console.aws.amazon.com/batch/home?region={region}#jobs/{kind}/{job_id}"


def container_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node's latest container: the node's own fields, completed with those of its latest attempt."""
    attempts = node.get("attempts") or [{}]
    return {**attempts[-1].get("container", {}), **node.get("container", {})}


def _failure(node: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """Return how a node of a job failed: its exit code and the reasons that Batch and ECS give."""
    container = container_of(node)
    given = (container.get("reason"), node.get("statusReason"), job.get("statusReason"))
    reasons = [str(reason) for reason in dict.fromkeys(given) if reason]
    parts = [reason for reason in reasons if not reason.startswith(_GENERIC_REASONS)]
    if code := container.get("exitCode"):
        parts.insert(0, describe_shell_code(code))
    return ": ".join(parts) or "failed"
