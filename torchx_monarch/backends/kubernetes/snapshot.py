# SPDX-License-Identifier: BSD-3-Clause
"""Convert the objects of an app to a snapshot. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx.schedulers.kubernetes_scheduler import JOB_STATE, LABEL_REPLICA_ID

from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.kubernetes import names
from torchx_monarch.backends.kubernetes.attempts import Attempt, seconds
from torchx_monarch.backends.kubernetes.objects import AppObjects
from torchx_monarch.backends.kubernetes.request import Object
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State

_INDEX = "batch.kubernetes.io/job-completion-index"


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
        objects: its objects.
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
        spec: its role.
        index: its index in the role.
        attempts: its pods, the oldest first.
        job: what the role's Job reports.
        app: the objects of the app, for the names of hosts.
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
