# SPDX-License-Identifier: BSD-3-Clause
"""Convert the objects of an app to a snapshot. Pure functions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchx_monarch.backends.core.snapshot import (
    STOP_CODES,
    AppSnapshot,
    Outcome,
    ReplicaSnapshot,
    RoleSnapshot,
    seconds,
)
from torchx_monarch.backends.core.state_files import DamagedFileError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.kubernetes.request import (
    ANNOTATION_APP,
    ANNOTATION_ENDED,
    ANNOTATION_OPTIONS,
    LABEL_ROLE,
    TERMINATION_VARIABLE,
    Object,
    StoredOptions,
)
from torchx_monarch.model import codec
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import describe_shell_code
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.system import error_files, safe_files
from torchx_monarch.system.untrusted_text import one_line

_INDEX = "batch.kubernetes.io/job-completion-index"

DEADLINE = 1
"""The ``activeDeadlineSeconds`` that ``stop`` sets on a running pod: seconds from the pod's start."""

_NOT_STARTED = ("CreateContainer", "ErrImage", "Image", "InvalidImage", "RegistryUnavailable", "RunContainer")
"""Beginnings of the reasons for which a container waits because it cannot be started: the kubelet retries for ever
(torchx#207)."""

_MAX_LINE = 300

T = TypeVar("T")


@dataclass(frozen=True)
class AppObjects:
    """The objects of one app.

    Attributes:
        record: the Service, which carries the app's annotations.
    """

    namespace: str
    record: Object
    jobs: Sequence[Object] = ()
    pods: Sequence[Object] = ()

    @property
    def name(self) -> str:
        """The app's id without the namespace."""
        return str(self.record["metadata"]["name"])


@dataclass(frozen=True, kw_only=True)
class KubernetesSnapshot(AppSnapshot):
    """The state of an app.

    Attributes:
        objects: the objects that it was read from.
        attempts: the existing pods of each replica, the oldest first, by the role's name and the replica's id.
    """

    objects: AppObjects
    attempts: Mapping[tuple[str, int], Sequence[Attempt]]


@dataclass(frozen=True)
class JobReport:
    """What the Job of a role reports.

    Attributes:
        is_active: whether it may still start pods.
        finished, reason: as for ``RoleSnapshot``.
        succeeded, failed: indexes of the replicas that have finally succeeded or failed.
    """

    is_active: bool
    finished: State | None = None
    succeeded: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    reason: str = ""


def assemble(objects: AppObjects, now: float, refusals: Mapping[str, str] | None = None) -> KubernetesSnapshot:
    """Return the snapshot of an app.

    Args:
        now: the API server's time, in seconds since the epoch.
        refusals: why Jobs cannot create pods, by their uids.
    """
    annotations = objects.record["metadata"]["annotations"]
    app_id = f"{objects.namespace}:{objects.name}"
    options = _annotation(annotations, ANNOTATION_OPTIONS, StoredOptions, app_id)
    ended = ANNOTATION_ENDED in annotations
    ending = _annotation(annotations, ANNOTATION_ENDED, Outcome, app_id) if ended else None
    submitted = SubmittedApp.unpack(annotations[ANNOTATION_APP], f"the annotation {ANNOTATION_APP} of {app_id}")
    jobs = {job["metadata"]["labels"].get(LABEL_ROLE): job for job in objects.jobs}
    pods = _by_replica(objects.pods)
    roles, attempts = [], dict[tuple[str, int], Sequence[Attempt]]()
    host_suffix = f".{objects.name}.{objects.namespace}.svc"  # resolves in every namespace of the cluster
    for index, spec in enumerate(submitted.roles):
        report = _job_report(jobs.get(str(index)), refusals or {})
        replicas = []
        for number in range(spec.replicas):
            attempts[spec.name, number] = its_attempts = pods.get((index, number), [])
            stuck_before = now - options.pull_timeout
            replicas.append(replica(spec, number, its_attempts, report, host_suffix, stuck_before))
        roles.append(RoleSnapshot(spec, replicas, report.finished, report.reason))
    return KubernetesSnapshot(
        app_id=app_id,
        name=submitted.app.name,
        roles=roles,
        app=submitted.app,
        created=seconds(objects.record["metadata"]["creationTimestamp"]),
        started=min((pod.started for pods in attempts.values() for pod in pods if pod.started), default=0.0),
        grace=options.grace,
        ending=ending,
        objects=objects,
        attempts=attempts,
    )


def _annotation(annotations: Mapping[str, str], name: str, kind: type[T], app_id: str) -> T:
    try:
        return codec.decode(kind, safe_files.parse_json(annotations.get(name, "")))
    except ValueError as error:
        raise DamagedFileError(f"the annotation {name} of {app_id} is damaged: {error}") from None


def replica(
    spec: RoleSpec, index: int, attempts: Sequence[Attempt], job: JobReport, host_suffix: str, stuck_before: float
) -> ReplicaSnapshot:
    """Return the snapshot of a replica.

    Args:
        host_suffix: what follows the host name of a pod in its DNS name.
        stuck_before: a pod that could not be started since before this time, in seconds since the epoch, is stuck.
    """
    last = attempts[-1] if attempts else None
    state = _replica_state(spec, index, last, job)
    failed = state is State.FAILED
    if last is None:
        failure = f"replica {spec.name}/{index} failed; its pod is gone" if failed else ""
        return ReplicaSnapshot(spec.name, index, state, failure=failure, is_error_lost=failed)
    running = [attempt for attempt in attempts if attempt.is_running]
    return ReplicaSnapshot(
        role=spec.name,
        id=index,
        state=state,
        hostname=f"{last.host}{host_suffix}" if last.host else "",
        address=last.address,
        started=last.started,
        ended=last.ended,
        exit_code=last.exit_code,
        restarts=len(attempts) - 1,
        rank_restarts=sum(attempt.rank_restarts for attempt in attempts),
        failure=f"replica {spec.name}/{index} {last.failure}" if failed else "",
        error=last.error if failed else "",
        waiting=last.waiting,
        is_stuck=0 < last.stuck_since < stuck_before,
        is_stopping=bool(running) and all(attempt.is_stopping for attempt in running),
        was_stopped=last.was_deleted,
    )


def _replica_state(spec: RoleSpec, index: int, last: Attempt | None, job: JobReport) -> State:
    if index in job.succeeded or (last and last.phase == "Succeeded"):
        return State.SUCCEEDED
    if last is None:
        return State.FAILED if index in job.failed else State.PENDING if job.is_active else State.CANCELLED
    if last.is_running:
        return State.PENDING if last.phase == "Pending" else State.RUNNING
    if index in job.failed or not job.is_active or spec.max_retries == 0:
        return State.CANCELLED if last.has_deadline else State.FAILED
    return State.PENDING  # Kubernetes will start it again


def _job_report(job: Object | None, refusals: Mapping[str, str]) -> JobReport:
    if job is None:  # it was deleted
        return JobReport(False)
    status = job.get("status") or {}
    conditions = _conditions(status)
    finished, reason = None, refusals.get(job["metadata"]["uid"], "")
    if _holds(conditions, "Complete"):
        finished = State.SUCCEEDED
    elif _holds(conditions, "Failed"):
        finished, reason = State.FAILED, _reason(conditions["Failed"])
    elif job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        reason = f"waits for Kueue to admit it to the queue {queue}" if queue else "is suspended"
    is_active = finished is None and "deletionTimestamp" not in job["metadata"]
    succeeded, failed = indexes(status.get("completedIndexes")), indexes(status.get("failedIndexes"))
    return JobReport(is_active, finished, succeeded, failed, reason)


def indexes(text: str | None) -> frozenset[int]:
    """Parse the index list of a Job's status, such as ``0,2-4``; None and an empty text are an empty list."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def _by_replica(pods: Sequence[Object]) -> dict[tuple[int, int], list[Attempt]]:
    """Return the pods by the index of their role in the app and of their replica in the role, the oldest first."""
    found = defaultdict[tuple[int, int], list[Attempt]](list)
    for pod in pods:
        labels, annotations = pod["metadata"]["labels"], pod["metadata"].get("annotations") or {}
        place = labels.get(LABEL_ROLE, ""), annotations.get(_INDEX, "")
        if all(re.fullmatch(r"\d{1,9}", number) for number in place):  # any user of the namespace may set our labels
            found[int(place[0]), int(place[1])].append(Attempt(pod))
    for attempts in found.values():
        attempts.sort(key=lambda attempt: (attempt.created, attempt.is_running))
    return found


class Attempt:
    """One start of a replica: one pod. Times are in seconds since the epoch, 0 before.

    Attributes:
        is_running: whether the pod runs or may still start.
        has_deadline: whether ``stop`` has ended it by a deadline.
        was_deleted: whether it ended by the signal that the deletion of its pod has sent, and left no error file: its
            Job deletes the pods that still run when too many others have failed.
        waiting: why it cannot be scheduled or started; empty for normal progress.
        stuck_since: since when the container could not be started; 0 if it could.
        failure: how it failed, as a clause that follows the replica's name; empty if it has not.
        error: the error file that the host has left as its termination message, as JSON text; empty without one.
        rank_restarts: restarts of its ranks that its ended containers have reported.
    """

    def __init__(self, pod: Object) -> None:
        metadata, spec, status = pod["metadata"], pod["spec"], _section(pod, "status")
        main = spec["containers"][0]  # a pod overlay may have added further ones
        conditions = _conditions(status)
        reported = {container["name"]: container for container in status.get("containerStatuses") or ()}
        container: Object = reported.get(main.get("name"), {})
        state = _section(container, "state")
        ended: Object = _section(state, "terminated")
        self.name: str = metadata["name"]
        self.container: str = main.get("name", "")
        self.phase: str = status.get("phase") or "Pending"
        self.is_running = self.phase not in ("Succeeded", "Failed")
        self.host: str = "" if self.phase == "Pending" else spec.get("hostname") or self.name
        self.address: str = (status.get("podIP") or "") if self.phase == "Running" else ""
        self.created = seconds(metadata["creationTimestamp"])
        self.started = seconds(status.get("startTime"))
        self.ended = seconds(ended.get("finishedAt"))
        if not self.ended and not self.is_running:  # without a container
            changes = (seconds(condition.get("lastTransitionTime")) for condition in conditions.values())
            self.ended = max(changes, default=0.0)
        self.exit_code: int | None = ended.get("exitCode")
        is_deleted = "deletionTimestamp" in metadata
        self.has_deadline = spec.get("activeDeadlineSeconds") == DEADLINE
        self.is_stopping = self.has_deadline or is_deleted
        since = self.started or self.created
        self.waiting, self.stuck_since = _waiting(conditions, _section(state, "waiting"), since)
        # What a pod without a host leaves as its termination message is its program's: its output, or a file.
        ends = (ended, _section(_section(container, "lastState"), "terminated")) if _runs_host(main) else ({}, {})
        result, earlier = map(HostResult.from_text, (ends[0].get("message"), ends[1].get("message")))
        self.rank_restarts = result.rank_restarts + earlier.rank_restarts
        self.error = error_files.cleaned(ended["message"]) if result.names_cause else ""
        disruption = ""
        if status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded, UnexpectedAdmissionError ...
            disruption = f"was ended by its node ({_reason(status)})"
        elif _holds(conditions, "DisruptionTarget"):
            disruption = f"was taken away by Kubernetes ({_reason(conditions['DisruptionTarget'])})"
        has_cause = disruption or self.error or ended.get("reason") == "OOMKilled"
        self.was_deleted = is_deleted and self.exit_code in STOP_CODES and not has_cause
        place = f"on node {spec['nodeName']} " if spec.get("nodeName") else ""
        failure = place + (disruption or _failure(ended, main, _runs_host(main)))
        self.failure = failure if self.phase == "Failed" else ""


def _section(parent: Object, name: str) -> Object:
    """Return a part of an object, which the API server may leave out or give as null."""
    return parent.get(name) or {}


def _runs_host(container: Object) -> bool:
    """Return whether a container runs a host process, rather than another program."""
    return any(variable["name"] == TERMINATION_VARIABLE for variable in container.get("env") or ())


def _waiting(conditions: Mapping[str, Object], waiting: Object, since: float) -> tuple[str, float]:
    """Return what a pod waits for, and since when its container could not be started, 0 if it could."""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("reason") == "Unschedulable":
        return f"no node can take it (Unschedulable): {scheduled.get('message', '')}".rstrip(": "), 0.0
    if waiting.get("reason", "").startswith(_NOT_STARTED):
        return _reason(waiting), since
    return "", 0.0


def _failure(ended: Object, container: Object, runs_host: bool) -> str:
    reason, message = ended.get("reason"), (ended.get("message") or "").strip()
    if reason == "OOMKilled":
        limits = (container.get("resources") or {}).get("limits") or {}
        return f"was killed for want of memory (OOMKilled), of which it had {limits.get('memory', 'no limit')} (memMB)"
    if reason in ("StartError", "ContainerCannotRun", "ContainerStatusUnknown"):
        return f"could not be started ({reason}): {message}".rstrip(": ")
    how = describe_shell_code(ended["exitCode"]) if ended else "failed"
    if message and not (runs_host and message.startswith("{")):
        how += f"; its last output: {one_line(message.splitlines()[-1], _MAX_LINE)}"
    return how


def _conditions(status: Object) -> dict[str, Object]:
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def _holds(conditions: Mapping[str, Object], kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"


def _reason(described: Mapping[str, Any]) -> str:
    return f"{described.get('reason', '')}: {described.get('message', '')}".strip(": ")
