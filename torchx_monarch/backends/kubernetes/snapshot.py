# SPDX-License-Identifier: BSD-3-Clause
"""Convert the objects of an app to a snapshot. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from torchx.schedulers.kubernetes_scheduler import JOB_STATE, LABEL_REPLICA_ID

from torchx_monarch.backends.core.snapshot import STOP_CODES, AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.kubernetes import names
from torchx_monarch.backends.kubernetes.objects import AppObjects
from torchx_monarch.backends.kubernetes.request import TERMINATION_VARIABLE, Object
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import describe_shell_code
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.system import error_files
from torchx_monarch.system.untrusted_text import one_line

_INDEX = "batch.kubernetes.io/job-completion-index"

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


@dataclass(frozen=True, kw_only=True)
class KubernetesSnapshot(AppSnapshot):
    """The state of an app.

    Attributes:
        objects: the objects that it was read from.
        attempts: the existing pods of each replica, the oldest first, by the role's name and the replica's id.
    """

    objects: AppObjects
    attempts: Mapping[tuple[str, int], Sequence[Attempt]]

    @property
    def open_jobs(self) -> list[Object]:
        """The Jobs that may still run pods."""
        is_open = {str(index) for index, role in enumerate(self.roles) if role.is_open}
        return [job for job in self.objects.jobs if job["metadata"]["labels"].get(names.LABEL_ROLE) in is_open]


@dataclass(frozen=True)
class JobReport:
    """What the Job of a role, or the Volcano job of its app, reports.

    Attributes:
        is_active: whether it may still start pods.
        finished: the state in which a Job has ended; None before its end.
        succeeded, failed: indexes of the replicas that have finally succeeded or failed.
        reason: what the Job waits for, or why it failed; empty if unknown.
        is_aborted: whether a Volcano job was aborted, as ``stop`` does: Volcano deletes its running pods.
    """

    is_active: bool
    finished: State | None = None
    succeeded: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    reason: str = ""
    is_aborted: bool = False


def assemble(objects: AppObjects, now: float) -> KubernetesSnapshot:
    """Return the snapshot of an app.

    Args:
        now: the API server's time, in seconds since the epoch.

    Raises:
        DamagedFileError: the annotation with the app is damaged.
    """
    metadata = objects.record["metadata"]
    annotations = metadata["annotations"]
    options = json.loads(annotations[names.ANNOTATION_OPTIONS])
    app_id = f"{objects.namespace}:{objects.name}"
    source = f"the annotation {names.ANNOTATION_APP} of {app_id}"
    submitted = SubmittedApp.unpack(annotations[names.ANNOTATION_APP], source)
    native = _volcano_outcome(objects.record) if objects.mode == "volcano" else None
    jobs = {job["metadata"]["labels"].get(names.LABEL_ROLE): job for job in objects.jobs}
    roles, attempts = [], dict[tuple[str, int], Sequence[Attempt]]()
    for index, spec in enumerate(submitted.roles):
        job = jobs.get(str(index))
        if native is not None:
            status = JobReport(not native.state.is_terminal, is_aborted=native.state is State.CANCELLED)
        else:
            status = job_status(job, objects.refusals)
        replicas = []
        for number, replica_attempts in enumerate(_attempts(objects.pods, index, spec.replicas)):
            attempts[spec.name, number] = replica_attempts
            replicas.append(
                replica(spec, number, replica_attempts, status, objects, now - float(options["pull_timeout"]))
            )
        roles.append(RoleSnapshot(spec, replicas, status.is_active, status.finished, status.reason))
    ending = _ending(annotations)
    if native is not None and native.state is State.CANCELLED and ending is not None:
        native = ending  # ``stop`` has aborted the job
    elif native is not None and any(
        replica_snapshot.failure or replica_snapshot.waiting for role in roles for replica_snapshot in role.replicas
    ):
        native = Outcome(native.state)  # a pod's reason is more exact than Volcano's
    return KubernetesSnapshot(
        app_id=app_id,
        name=submitted.app.name,
        roles=roles,
        app=submitted.app,
        created=seconds(metadata["creationTimestamp"]),
        started=min((pod.started for pods in attempts.values() for pod in pods if pod.started), default=0.0),
        grace=float(options["grace"]),
        native=native,
        ending=ending,
        objects=objects,
        attempts=attempts,
    )


def replica(
    spec: RoleSpec, index: int, attempts: Sequence[Attempt], job: JobReport, app: AppObjects, stuck_before: float
) -> ReplicaSnapshot:
    """Return the snapshot of a replica.

    Args:
        stuck_before: a pod that could not be started since before this time, in seconds since the epoch, is stuck.
    """
    last = attempts[-1] if attempts else None
    living = [attempt for attempt in attempts if attempt.lives]
    state = _replica_state(spec, index, last, job)
    failed = state is State.FAILED
    return ReplicaSnapshot(
        role=spec.name,
        id=index,
        state=state,
        hostname=names.host(last.host, app.name, app.namespace) if last and last.host else "",
        address=last.address if last else "",
        started=last.started if last else 0.0,
        ended=last.ended if last else 0.0,
        exit_code=last.exit_code if last else None,
        restarts=max(0, len(attempts) - 1),
        rank_restarts=sum(attempt.rank_restarts for attempt in attempts),
        failure=f"replica {spec.name}/{index} {last.failure if last else 'failed; its pod is gone'}" if failed else "",
        error=last.error if failed and last else "",
        waiting=last.waiting if last else "",
        is_stuck=last is not None and 0 < last.stuck_since < stuck_before,
        is_stopping=bool(living) and all(attempt.stopping or attempt.deleting for attempt in living),
        is_error_lost=failed and last is None,
        was_stopped=last is not None and last.was_deleted,
        lingers=state.is_terminal and bool(living),
    )


def _replica_state(spec: RoleSpec, index: int, last: Attempt | None, job: JobReport) -> State:
    if index in job.succeeded or (last and last.phase == "Succeeded"):
        return State.SUCCEEDED
    if last is None:
        return State.FAILED if index in job.failed else State.PENDING if job.is_active else State.CANCELLED
    if last.lives:
        return State.PENDING if last.phase == "Pending" else State.RUNNING
    if index in job.failed or not job.is_active or spec.max_retries == 0:
        is_cancelled = last.stopping or (job.is_aborted and last.was_deleted)
        return State.CANCELLED if is_cancelled else State.FAILED
    return State.PENDING  # Kubernetes will start it again


def job_status(job: Object | None, refusals: Mapping[str, str]) -> JobReport:
    """Return what an Indexed Job reports.

    Args:
        job: the Job; None if it was deleted.
        refusals: as in ``AppObjects``.
    """
    if job is None:
        return JobReport(False)
    status = job.get("status") or {}
    true = {
        condition["type"]: condition
        for condition in status.get("conditions") or ()
        if condition.get("status") == "True"
    }
    finished, reason = None, ""
    if "Complete" in true:
        finished = State.SUCCEEDED
    elif "Failed" in true:
        finished = State.FAILED
        reason = f"{true['Failed'].get('reason', '')}: {true['Failed'].get('message', '')}".strip(": ")
    elif job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        reason = f"waits for Kueue to admit it to the queue {queue}" if queue else "is suspended"
    else:
        reason = refusals.get(job["metadata"]["uid"], "")
    is_active = finished is None and "deletionTimestamp" not in job["metadata"]
    completed, failed = indexes(status.get("completedIndexes")), indexes(status.get("failedIndexes"))
    return JobReport(is_active, finished, completed, failed, reason)


def indexes(text: str | None) -> frozenset[int]:
    """Parse the index list of a Job's status, such as ``0,2-4``; None and an empty text are an empty list."""
    found: set[int] = set()
    for part in (text or "").split(","):
        low, _, high = part.partition("-")
        if low:
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def _volcano_outcome(job: Object) -> Outcome:
    """Return the state of a Volcano job, with Volcano's reason if it fails or waits."""
    status = job.get("status") or {}
    reported = status.get("state") or {}
    phase = reported.get("phase", "")
    # TorchX reports a job without a phase as UNKNOWN (torchx#999). One value of JOB_STATE is of a different enum.
    state = State[JOB_STATE[phase].name] if phase in JOB_STATE else State.PENDING
    message = str(reported.get("message", "")) if state in (State.FAILED, State.PENDING) else ""
    if not status:
        queue = job["spec"].get("queue")
        message = f"Volcano has not looked at the job yet: does it run here, and is there a queue {queue}?"
    return Outcome(state, message)


def _attempts(pods: Sequence[Object], role: int, replicas: int) -> list[list[Attempt]]:
    """Return the pods of each replica of a role, the oldest first."""
    found: list[list[Attempt]] = [[] for _ in range(replicas)]
    for pod in pods:
        index, number = _place(pod)
        if index == role and 0 <= number < replicas:
            found[number].append(Attempt.of(pod))
    for replica_attempts in found:
        replica_attempts.sort(key=lambda attempt: (attempt.created, attempt.lives))
    return found


def _place(pod: Object) -> tuple[int, int]:
    """Return the index of a pod's role in the app, and of its replica in the role; -1 for what its labels lack."""
    labels, annotations = pod["metadata"]["labels"], pod["metadata"].get("annotations") or {}
    role, number = labels.get(names.LABEL_ROLE, ""), str(annotations.get(_INDEX) or labels.get(LABEL_REPLICA_ID) or "")
    return int(role) if role.isdigit() else -1, int(number) if number.isdigit() else -1


def _ending(annotations: Mapping[str, str]) -> Outcome | None:
    """Return how this package has begun to end an app, without the time, so that the rest is stopped immediately."""
    if names.ANNOTATION_ENDED not in annotations:
        return None
    note = json.loads(annotations[names.ANNOTATION_ENDED])
    return Outcome(State[note["state"]], note["msg"])


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
