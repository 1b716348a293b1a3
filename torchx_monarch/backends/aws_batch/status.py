# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compute the states of replicas and apps from Batch's descriptions of a job and its nodes. Pure functions.

Batch gives a multi-node job the state of its main node, which is replica 0 of the first role, and stops the other nodes
when the main node ends. So the main node's host first waits for the other roles (``controller.role_coordinator``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchx.specs import NONE, AppState, ReplicaStatus, Role, RoleStatus

from torchx_monarch.model.job_result import describe_code

CANCELLED = "cancelled through torchx"
"""The reason given to TerminateJob. It marks a job as cancelled, for which Batch has no state but FAILED."""

DEFAULT_LOG_GROUP = "/aws/batch/job"

_STATES = {
    "SUBMITTED": AppState.PENDING,
    "PENDING": AppState.PENDING,
    "RUNNABLE": AppState.PENDING,
    "STARTING": AppState.PENDING,
    "RUNNING": AppState.RUNNING,
    "SUCCEEDED": AppState.SUCCEEDED,
    "FAILED": AppState.FAILED,
}

ENDED = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)

_GENERIC_REASONS = ("Essential container in task exited", "Task failed to start")
"""Beginnings of status reasons that give no cause; another field of the job gives it."""

_HINTS = (
    # (beginning of a reason, advice), longer beginnings first
    (
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
        "the job wants more vCPUs than the maximum of the queue's compute environments",
    ),
    (
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
        "no instance type of the queue's compute environments has the cpu, memory and gpu asked for (an instance keeps "
        "some 4 % of its memory for itself)",
    ),
    (
        "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS",
        "the service role of the compute environment lacks permissions (AWSBatchServiceRole)",
    ),
    ("CAPACITY:", "AWS has no such instance free now: wait, or allow other instance types or availability zones"),
    ("MISCONFIGURATION:", "see the compute environment and its launch template"),
    ("ACTION_REQUIRED", "see the compute environment"),
    ("UNDETERMINED", "see https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html"),
    ("CannotPullContainerError", "see the name of the image, and whether the nodes may and can reach its registry"),
    ("CannotPullECRContainerError", "see the name of the image, and the permissions of the instance or execution role"),
    ("CannotPullImageManifestError", "see the name and the tag of the image"),
    ("OutOfMemoryError", "it had {memory} MB (memMB)"),
    ("CannotStartContainerError", "see the command and the mounts"),
    ("CannotCreateContainerError", "see the mounts and devices"),
    ("ResourceInitializationError", "see execution_role_arn, secrets and mounts"),
    (
        "Host EC2",
        "the instance was taken away or broke: host_retries, or max_retries, starts such a job again",
    ),
)


def state(job: Mapping[str, Any]) -> AppState:
    """Return the state of a job or a node from Batch's description."""
    found = _STATES.get(job.get("status", ""), AppState.UNKNOWN)
    if found is AppState.FAILED and str(job.get("statusReason", "")).startswith(CANCELLED):
        return AppState.CANCELLED
    return found


def restarts(job: Mapping[str, Any]) -> int:
    """Return how often Batch has restarted a job."""
    ended = sum("stoppedAt" in attempt for attempt in job.get("attempts", ()))
    return max(0, ended - 1) if state(job) in ENDED else ended


def roles_statuses(
    job: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]], roles: Sequence[Role]
) -> list[RoleStatus]:
    """Return the status of each role's replicas.

    Args:
        job: Batch's description of the job.
        nodes: Batch's description of each known node, by node index.
        roles: the app's roles.
    """
    of_job, first, found = state(job), 0, []
    for role in roles:
        replicas = []
        for replica in range(role.num_replicas):
            node = nodes.get(first + replica)
            at = address(node or {})
            replicas.append(
                ReplicaStatus(
                    id=replica,
                    role=role.name,
                    state=_shown(of_job, node),
                    hostname=_hostname(at, str(job.get("jobArn", ""))),
                    hostaddr=at or NONE,
                )
            )
        found.append(RoleStatus(role.name, replicas))
        first += role.num_replicas
    return found


def _shown(of_job: AppState, node: Mapping[str, Any] | None) -> AppState:
    """Return the state of a node to show: CANCELLED, not FAILED, if it was stopped because the job had ended.

    Args:
        of_job: the job's state.
        node: Batch's description of the node; None if Batch does not know it yet.
    """
    if node is None:
        return of_job if of_job in ENDED else AppState.PENDING
    found = state(node)
    if of_job in (AppState.CANCELLED, AppState.SUCCEEDED) and found is not AppState.SUCCEEDED:
        return AppState.CANCELLED
    return found


def _container(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node's latest container: the node's own fields, completed with those of its latest attempt."""
    attempts = node.get("attempts") or [{}]
    return {**attempts[-1].get("container", {}), **node.get("container", {})}


def address(node: Mapping[str, Any]) -> str:
    """Return a node's private address; empty if Batch reports none, as for a container on its host's network."""
    interfaces = _container(node).get("networkInterfaces") or [{}]
    return str(interfaces[0].get("privateIpv4Address", ""))


def _hostname(at: str, arn: str) -> str:
    """Return the VPC's DNS name for an address, since Batch reports addresses only; empty for an empty address."""
    if not at:
        return ""
    region = (arn.split(":") + [""] * 4)[3]
    domain = "ec2.internal" if region == "us-east-1" else f"{region}.compute.internal"
    return f"ip-{at.replace('.', '-')}.{domain}"


def explanation(job: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]], roles: Sequence[Role]) -> str:
    """Return in one line why a job failed, or what it waits for; empty if neither applies or is known."""
    now = state(job)
    if now is AppState.PENDING:
        reason = str(job.get("statusReason", ""))
        return f"{job['status']}: {_with_hint(reason, {})}" if reason else ""
    if now is not AppState.FAILED:
        return CANCELLED if now is AppState.CANCELLED else ""
    first = cause(nodes)
    reason = str(job.get("statusReason", ""))
    if first is None:
        return _with_hint(reason, _container(job))
    container = _container(nodes[first])
    said = [str(each) for each in (container.get("reason"), nodes[first].get("statusReason"), reason) if each]
    said = [each for at, each in enumerate(said) if each not in said[:at] and not each.startswith(_GENERIC_REASONS)]
    code = container.get("exitCode")
    ended = [describe_code(128 - code if code > 128 else code)] if code else []
    how = ": ".join([*ended, *(_with_hint(each, container) for each in said)]) or "failed"
    return f"replica {name(first, roles)} {how}"


def variable(job: Mapping[str, Any], name: str) -> str:
    """Return the value of an environment variable in the first role's containers; empty if it is not set."""
    ranges = (job.get("nodeProperties") or {}).get("nodeRangeProperties") or [{}]
    container = ranges[0].get("container") or job.get("container") or {}
    return next((str(one.get("value", "")) for one in container.get("environment", ()) if one.get("name") == name), "")


def cause(nodes: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Return the index of the node that failed first; None if none has failed."""
    failed = [index for index, node in nodes.items() if state(node) is AppState.FAILED]
    return min(failed, key=lambda index: (nodes[index].get("stoppedAt", float("inf")), index), default=None)


def name(index: int, roles: Sequence[Role]) -> str:
    """Return ROLE/REPLICA of a node index."""
    for role in roles:
        if index < role.num_replicas:
            return f"{role.name}/{index}"
        index -= role.num_replicas
    return f"node {index}"


def first_node(role_name: str, roles: Sequence[Role]) -> int:
    """Return the node index of a role's replica 0."""
    before = 0
    for role in roles:
        if role.name == role_name:
            return before
        before += role.num_replicas
    raise KeyError(role_name)


def _with_hint(reason: str, container: Mapping[str, Any]) -> str:
    given = [each["value"] for each in container.get("resourceRequirements", ()) if each["type"] == "MEMORY"]
    memory = given[0] if given else container.get("memory", "?")
    hint = next((text for start, text in _HINTS if reason.startswith(start)), "")
    return f"{reason.rstrip('.')} ({hint.format(memory=memory)})" if hint else reason


def streams(node: Mapping[str, Any], group: str) -> list[tuple[str, str]]:
    """Return the CloudWatch streams of a node as (group, stream), one for each attempt, in order."""
    found = [attempt.get("container", {}).get("logStreamName") for attempt in node.get("attempts", ())]
    found.append(node.get("container", {}).get("logStreamName"))
    return [(group, stream) for stream in dict.fromkeys(found) if stream]


def log_group(job: Mapping[str, Any]) -> str:
    """Return the CloudWatch log group of a job's containers."""
    nodes = job.get("nodeProperties", {}).get("nodeRangeProperties") or [job]
    options = nodes[0].get("container", {}).get("logConfiguration", {}).get("options", {})
    return str(options.get("awslogs-group", DEFAULT_LOG_GROUP))


def console_url(arn: str, multinode: bool = False) -> str:
    """Return the URL of a job's page in the AWS console; empty if ``arn`` is not the ARN of a job."""
    found = re.fullmatch(r"arn:([a-z-]+):batch:([a-z0-9-]+):\d*:job/([a-zA-Z0-9-]+)", arn)
    if found is None:
        return ""
    partition, region, job_id = found.groups()
    kind = "mnp-job" if multinode else "detail"
    domain = {"aws-cn": "amazonaws.cn", "aws-us-gov": "amazonaws-us-gov.com"}.get(partition, "aws.amazon.com")
    host = f"{region}.console.{domain}" if partition == "aws" else f"console.{domain}"
    return f"https://{host}/batch/home?region={region}#jobs/{kind}/{job_id}"
