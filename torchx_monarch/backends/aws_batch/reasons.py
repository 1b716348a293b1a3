# SPDX-License-Identifier: BSD-3-Clause
"""Describe in one line why a job or a node failed, or what a job waits for, with advice for Batch's known reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchx_monarch.model.job_result import describe_shell_code

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


def container_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node's latest container: the node's own fields, completed with those of its latest attempt."""
    attempts = node.get("attempts") or [{}]
    return {**attempts[-1].get("container", {}), **node.get("container", {})}


def failure(node: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """Return how a node of a job failed: its exit code and the reasons that Batch and ECS give."""
    container = container_of(node)
    given = (container.get("reason"), node.get("statusReason"), job.get("statusReason"))
    reasons = [
        reason for reason in dict.fromkeys(map(str, filter(None, given))) if not reason.startswith(_GENERIC_REASONS)
    ]
    code = container.get("exitCode")
    ended = [describe_shell_code(code)] if code else []
    return ": ".join([*ended, *(with_hint(reason, container) for reason in reasons)]) or "failed"


def with_hint(reason: str, container: Mapping[str, Any]) -> str:
    """Return a reason followed by advice, if there is any.

    Args:
        reason: Batch's or ECS's reason.
        container: the container that it is about; may be empty.
    """
    given = [
        requirement["value"]
        for requirement in container.get("resourceRequirements", ())
        if requirement["type"] == "MEMORY"
    ]
    memory = given[0] if given else container.get("memory", "?")
    hint = next((text for start, text in _HINTS if reason.startswith(start)), "")
    return f"{reason.rstrip('.')} ({hint.format(memory=memory)})" if hint else reason
