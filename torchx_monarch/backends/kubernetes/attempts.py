# SPDX-License-Identifier: BSD-3-Clause
"""Read one start of a replica, an attempt, from its pod. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from torchx_monarch.backends.core.snapshot import STOP_CODES
from torchx_monarch.backends.kubernetes.request import TERMINATION_VARIABLE, Object
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import describe_shell_code
from torchx_monarch.system import error_files
from torchx_monarch.system.untrusted_text import one_line

DEADLINE = 1
"""The ``activeDeadlineSeconds`` that ``stop`` sets on a running pod: seconds from the pod's start."""

_NOT_STARTED = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RegistryUnavailable",
        "RunContainerError",
    }
)
"""Reasons for which a container waits because the kubelet cannot start it. It retries for ever (torchx#207)."""

_LONGEST_LINE = 300


@dataclass(frozen=True)
class Attempt:
    """One start of a replica: one pod.

    Attributes:
        pod: the pod's name.
        container: name of the container that runs the role's command, which is the first one.
        host: the pod's host name; empty before the pod starts.
        address: the pod's IP address; empty unless it runs.
        phase: the pod's phase in Kubernetes.
        created: when the pod was created, in seconds since the epoch.
        started: when its node began to start it, in seconds since the epoch; 0 before.
        ended: when it ended, in seconds since the epoch; 0 before.
        exit_code: exit code of its container; None before its end.
        deleting: whether the pod is being deleted.
        stopping: whether ``stop`` has ended it by a deadline.
        was_deleted: whether it ended by the signal that the deletion of its pod has sent, and left no error file: its
            Job deletes the pods that still run when too many others have failed.
        waiting: why it cannot be scheduled or started; empty for normal progress.
        stuck_since: seconds since the epoch from which the container could not be started; 0 if it could.
        failure: how it failed, as a clause that follows the replica's name; empty if it has not.
        error: the error file that the host has left as its termination message, as JSON text; empty without one.
        rank_restarts: restarts of its ranks that its ended containers have reported.
    """

    pod: str
    container: str = ""
    host: str = ""
    address: str = ""
    phase: str = "Pending"
    created: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    exit_code: int | None = None
    deleting: bool = False
    stopping: bool = False
    was_deleted: bool = False
    waiting: str = ""
    stuck_since: float = 0.0
    failure: str = ""
    error: str = ""
    rank_restarts: int = 0

    @property
    def lives(self) -> bool:
        """Whether the pod runs or may still start."""
        return self.phase not in ("Succeeded", "Failed")

    @classmethod
    def of(cls, pod: Object) -> Attempt:
        """Read a pod object."""
        metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
        conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
        name = spec["containers"][0].get("name", "")
        # A pod overlay may have added further containers.
        statuses = status.get("containerStatuses") or ()
        container: Object = next(
            (container_status for container_status in statuses if container_status.get("name") == name), {}
        )
        state, before = container.get("state") or {}, (container.get("lastState") or {}).get("terminated") or {}
        waits, terminated = state.get("waiting") or {}, state.get("terminated") or {}
        started = seconds(status.get("startTime") or "")
        waiting, stuck = "", 0.0
        scheduled = conditions.get("PodScheduled") or {}
        if scheduled.get("reason") == "Unschedulable":
            waiting = f"no node can take it (Unschedulable): {scheduled.get('message', '')}"
        elif waits.get("reason") in _NOT_STARTED:
            waiting = f"{waits['reason']}: {waits.get('message', '')}"
            stuck = started or seconds(metadata["creationTimestamp"])
        phase = status.get("phase") or "Pending"
        result, earlier = (_result(termination, spec) for termination in (terminated, before))
        deleting = "deletionTimestamp" in metadata
        disruption = _disruption(status, conditions)
        return cls(
            pod=metadata["name"],
            container=name,
            host=spec.get("hostname") or metadata["name"] if phase != "Pending" else "",
            address=(status.get("podIP") or "") if phase == "Running" else "",
            phase=phase,
            created=seconds(metadata["creationTimestamp"]),
            started=started,
            ended=seconds(terminated.get("finishedAt") or "") or _ended(conditions, phase),
            exit_code=terminated.get("exitCode"),
            deleting=deleting,
            stopping=spec.get("activeDeadlineSeconds") == DEADLINE,
            was_deleted=deleting
            and terminated.get("exitCode") in STOP_CODES
            and not (disruption or result.names_cause or terminated.get("reason") == "OOMKilled"),
            waiting=waiting.strip(": "),
            stuck_since=stuck,
            failure=_failure(disruption, terminated, spec) if phase == "Failed" else "",
            error=error_files.cleaned(terminated["message"]) if result.names_cause else "",
            rank_restarts=result.rank_restarts + earlier.rank_restarts,
        )


def _result(terminated: Object, spec: Object) -> HostResult:
    """Return the result that a host has left as its termination message; an empty one for a pod without a host.

    The message of a pod without a host is what its program has written, its output or a file.
    """
    return HostResult.from_text(terminated.get("message") if _runs_host(spec) else None)


def _runs_host(spec: Object) -> bool:
    return any(variable["name"] == TERMINATION_VARIABLE for variable in spec["containers"][0].get("env") or ())


def _ended(conditions: Mapping[str, Object], phase: str) -> float:
    if phase not in ("Succeeded", "Failed"):
        return 0.0
    return max((seconds(condition.get("lastTransitionTime") or "") for condition in conditions.values()), default=0.0)


def _disruption(status: Object, conditions: Mapping[str, Object]) -> str:
    """Describe how its node or Kubernetes has ended a pod; empty if neither has."""
    target = conditions.get("DisruptionTarget") or {}
    if status.get("reason"):
        # Evicted, NodeLost, DeadlineExceeded, UnexpectedAdmissionError ...
        return f"was ended by its node ({status['reason']}: {status.get('message', '')})".replace(": )", ")")
    if target.get("status") == "True":
        return f"was taken away by Kubernetes ({target.get('reason', '')}: {target.get('message', '')})"
    return ""


def _failure(disruption: str, terminated: Object, spec: Object) -> str:
    """Describe how a pod failed, as a clause that follows the replica's name: "on node n1 exited with code 1"."""
    code = terminated.get("exitCode", 0)
    how = describe_shell_code(code) if terminated else "failed"
    reason = terminated.get("reason")
    if reason == "OOMKilled":
        limits = (spec["containers"][0].get("resources") or {}).get("limits") or {}
        how = f"was killed for want of memory (OOMKilled), of which it had {limits.get('memory', 'no limit')} (memMB)"
    elif reason in ("StartError", "ContainerCannotRun", "ContainerStatusUnknown"):
        how = f"could not be started ({reason}): {terminated.get('message', '')}".rstrip(": ")
    elif (said := (terminated.get("message") or "").strip()) and not (said.startswith("{") and _runs_host(spec)):
        how += f"; its last output: {one_line(said.splitlines()[-1], _LONGEST_LINE)}"
    how = disruption or how
    return f"on node {spec['nodeName']} {how}" if spec.get("nodeName") else how


def seconds(text: str) -> float:
    """Convert a Kubernetes time such as ``2026-11-20T10:11:12Z`` to seconds since the epoch; 0.0 for an empty text."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0
