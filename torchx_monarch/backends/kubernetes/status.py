# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compute the states of replicas, roles and apps from pods and Jobs. Pure functions.

``backends.outcome`` defines when a role or an app has succeeded or failed. An app has ended when none of its pods runs
or may still start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torchx.specs import AppState

from torchx_monarch.backends import outcome
from torchx_monarch.backends.kubernetes.request import Object
from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.model.job_result import RANK_RESTARTS, describe_code, is_secondary, read_error_file
from torchx_monarch.system import error_files
from torchx_monarch.system.untrusted_text import one_line

SETTLE = 10.0
"""Seconds after the grace period in which a failed app may still end by itself: its hosts end each other."""

DEADLINE = 1
"""The ``activeDeadlineSeconds`` that ``cancel`` sets on a running pod: seconds from the pod's start."""

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
        host: the pod's host name.
        node: the node's name; empty while the pod is not scheduled.
        address: the pod's IP address; empty unless it runs.
        phase: the pod's phase in Kubernetes.
        created, ended: seconds since the epoch; ``ended`` is 0 before the end.
        deleting: whether the pod is being deleted.
        stopping: whether ``cancel`` has ended it by a deadline.
        waiting: why it cannot be scheduled or started; empty for normal progress.
        stuck_since: seconds since the epoch from which the container could not be started; 0 if it could.
        failure: how it failed, as a clause for messages; empty if it has not.
        said: its termination message if that is an error file (``error_files.cleaned``), else empty.
        rank_restarts: restarts of its ranks that its ended containers have reported.
    """

    pod: str
    container: str = ""
    host: str = ""
    node: str = ""
    address: str = ""
    phase: str = "Pending"
    created: float = 0.0
    ended: float = 0.0
    deleting: bool = False
    stopping: bool = False
    waiting: str = ""
    stuck_since: float = 0.0
    failure: str = ""
    said: str = ""
    rank_restarts: int = 0

    @property
    def lives(self) -> bool:
        """Whether the pod runs or may still start."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The error file that the host has left as its termination message; None if it has left none."""
        left = read_error_file(self.said)
        return left if isinstance(left.get("message"), dict) else None

    @property
    def is_secondary(self) -> bool:
        """Whether the host reported a secondary failure: it lost another host, or ended because another had failed."""
        return is_secondary(self.said)


def attempt(pod: Object) -> Attempt:
    """Convert a pod object."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    name = spec["containers"][0].get("name", "")
    # A pod overlay may have added further containers.
    statuses = status.get("containerStatuses") or ()
    container: Object = next((one for one in statuses if one.get("name") == name), {})
    state, before = container.get("state") or {}, (container.get("lastState") or {}).get("terminated") or {}
    waits, terminated = state.get("waiting") or {}, state.get("terminated") or {}
    waiting, stuck = "", 0.0
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("reason") == "Unschedulable":
        waiting = f"no node can take it (Unschedulable): {scheduled.get('message', '')}"
    elif waits.get("reason") in _NOT_STARTED:
        waiting = f"{waits['reason']}: {waits.get('message', '')}"
        stuck = seconds(status.get("startTime") or metadata["creationTimestamp"])
    phase = status.get("phase") or "Pending"
    failure = _failure(status, conditions, terminated, spec) if phase == "Failed" else ""
    return Attempt(
        pod=metadata["name"],
        container=name,
        host=spec.get("hostname") or metadata["name"],
        node=spec.get("nodeName") or "",
        address=(status.get("podIP") or "") if phase == "Running" else "",
        phase=phase,
        created=seconds(metadata["creationTimestamp"]),
        ended=seconds(terminated.get("finishedAt") or "") or _ended(conditions, phase),
        deleting="deletionTimestamp" in metadata,
        stopping=spec.get("activeDeadlineSeconds") == DEADLINE,
        waiting=waiting.strip(": "),
        stuck_since=stuck,
        failure=failure,
        said=error_files.cleaned(terminated.get("message") or ""),
        rank_restarts=_rank_restarts(terminated) + _rank_restarts(before),
    )


def _rank_restarts(terminated: Object) -> int:
    number = read_error_file(terminated.get("message")).get(RANK_RESTARTS)
    return number if isinstance(number, int) else 0


def _ended(conditions: Mapping[str, Object], phase: str) -> float:
    if phase not in ("Succeeded", "Failed"):
        return 0.0
    return max((seconds(one.get("lastTransitionTime") or "") for one in conditions.values()), default=0.0)


def _failure(status: Object, conditions: Mapping[str, Object], terminated: Object, spec: Object) -> str:
    """Describe how a pod failed, as a clause that follows the replica's name."""
    code = terminated.get("exitCode", 0)
    how = describe_code(128 - code if code > 128 else code) if terminated else "failed"
    reason = terminated.get("reason")
    if reason == "OOMKilled":
        limits = (spec["containers"][0].get("resources") or {}).get("limits") or {}
        how = f"was killed for want of memory (OOMKilled), of which it had {limits.get('memory', 'no limit')} (memMB)"
    elif reason in ("StartError", "ContainerCannotRun", "ContainerStatusUnknown"):
        how = f"could not be started ({reason}): {terminated.get('message', '')}".rstrip(": ")
    elif terminated.get("message") and not terminated["message"].startswith("{"):
        how += f": {one_line(terminated['message'].strip().splitlines()[-1], _LONGEST_LINE)}"
    disruption = conditions.get("DisruptionTarget") or {}
    if status.get("reason"):
        # Evicted, NodeLost, DeadlineExceeded, UnexpectedAdmissionError ...
        how = f"was ended by its node ({status['reason']}: {status.get('message', '')})".replace(": )", ")")
    elif disruption.get("status") == "True":
        how = f"was taken away by Kubernetes ({disruption.get('reason', '')}: {disruption.get('message', '')})"
    return how


@dataclass(frozen=True)
class WorkStatus:
    """The state of the Kubernetes or Volcano job that starts a role's pods.

    Attributes:
        exists: whether a job exists that may start pods.
        finished: the state in which the job has ended; None before its end.
        succeeded, failed: indexes of the replicas that have finally succeeded or failed.
        word: what the job waits for, or why it failed; empty if unknown.
    """

    exists: bool
    finished: AppState | None = None
    succeeded: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    word: str = ""


def work_of_job(job: Object | None) -> WorkStatus:
    """Return the state of an Indexed Job; ``job`` is None if the Job was deleted."""
    if job is None:
        return WorkStatus(False)
    status = job.get("status") or {}
    true = {one["type"]: one for one in status.get("conditions") or () if one.get("status") == "True"}
    finished, word = None, ""
    if "Complete" in true:
        finished = AppState.SUCCEEDED
    elif "Failed" in true:
        finished = AppState.FAILED
        word = f"{true['Failed'].get('reason', '')}: {true['Failed'].get('message', '')}".strip(": ")
    elif job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        word = f"waits for Kueue to admit it to the queue {queue}" if queue else "is suspended"
    exists = "deletionTimestamp" not in job["metadata"]
    return WorkStatus(
        exists, finished, indexes(status.get("completedIndexes")), indexes(status.get("failedIndexes")), word
    )


def indexes(text: str | None) -> frozenset[int]:
    """Parse the index list of a Job's status, such as ``0,2-4``; None and an empty text are an empty list."""
    found: set[int] = set()
    for part in (text or "").split(","):
        low, _, high = part.partition("-")
        if low:
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


@dataclass(frozen=True)
class KubernetesReplica:
    """The state of a replica.

    Attributes:
        role: name of its role.
        id: its index in the role.
        attempts: its pods, the oldest first.
        state: its state, regardless of the app's.
    """

    role: str
    id: int
    attempts: Sequence[Attempt]
    state: AppState

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def failed_at(self) -> float:
        return self.last.ended if self.last else 0.0

    def place(self) -> tuple[bool, float]:
        """Return the sort key that puts the root cause first among failed replicas."""
        return self.last is not None and self.last.is_secondary, self.failed_at

    @property
    def failure(self) -> str:
        """Why it failed, as one line."""
        if self.last is None:
            return f"replica {self.role}/{self.id} failed; its pod is gone"
        where = f" on node {self.last.node}" if self.last.node else ""
        return f"replica {self.role}/{self.id}{where} {self.last.failure}"


def replica(
    role: str, index: int, attempts: Sequence[Attempt], work: WorkStatus, max_retries: int
) -> KubernetesReplica:
    """Compute the state of a replica.

    Args:
        role: name of its role.
        index: its index in the role.
        attempts: its pods, the oldest first.
        work: the state of its role's job.
        max_retries: the role's ``max_retries``.
    """
    last = attempts[-1] if attempts else None
    over = not work.exists or work.finished is not None
    if index in work.succeeded or (last and last.phase == "Succeeded"):
        state = AppState.SUCCEEDED
    elif last is None:
        state = AppState.CANCELLED if over else AppState.PENDING
    elif last.lives:
        state = AppState.PENDING if last.phase == "Pending" else AppState.RUNNING
    elif index in work.failed or over or max_retries == 0:
        state = AppState.CANCELLED if last.stopping else AppState.FAILED
    else:
        state = AppState.PENDING  # Kubernetes will start it again
    return KubernetesReplica(role, index, attempts, state)


@dataclass(frozen=True)
class Ended:
    """A decision to end an app, as noted in its record.

    Attributes:
        state: the app's final state.
        msg: the reason, for users; empty for none.
    """

    state: AppState
    msg: str = ""


@dataclass(frozen=True)
class KubernetesStatus:
    """The state of an app.

    Attributes:
        state: the state; terminal only when none of its pods runs or may still start.
        msg: what it waits for or why it ended, for users; may be empty.
        cause: the replica that failed first; None if none failed or the app did not end for a failure.
        pending_decision: the decided result, if pods are left that only ``describe`` can end; else None.
        decided: the time of the app's success, in seconds since the epoch; 0 without success.
    """

    state: AppState
    msg: str = ""
    cause: KubernetesReplica | None = None
    pending_decision: Ended | None = None
    decided: float = 0.0


@dataclass(frozen=True)
class Rules:
    """The inputs of an app's state besides its replicas.

    Attributes:
        now: the current time, in seconds since the epoch.
        grace: the grace period in seconds.
        pull_timeout: seconds after which a pod that cannot start fails the app.
        ended: how this scheduler has ended the app; None if it has not.
    """

    now: float
    grace: float
    pull_timeout: float
    ended: Ended | None = None


@dataclass(frozen=True)
class KubernetesRole:
    """The state of a role.

    Attributes:
        name: the role's name.
        replicas: all of its replicas, by index.
        work: the state of its job.
        policy: the rules for its success and failure.
    """

    name: str
    replicas: Sequence[KubernetesReplica]
    work: WorkStatus
    policy: RolePolicy

    def _ids(self, state: AppState) -> set[int]:
        return {one.id for one in self.replicas if one.state is state}

    @property
    def over(self) -> bool:
        """Whether all replicas have finally succeeded or failed."""
        return all(one.state in (AppState.SUCCEEDED, AppState.FAILED) for one in self.replicas)

    @property
    def open(self) -> bool:
        """Whether its job may still run pods. A job whose replicas are all over only lacks its own final status."""
        return self.work.exists and self.work.finished is None and not self.over

    @property
    def failed(self) -> Sequence[KubernetesReplica]:
        """The replicas that have finally failed; empty while the role tolerates their failure."""
        if self.policy.tolerates(self._ids(AppState.FAILED)):
            return ()
        return [one for one in self.replicas if one.state is AppState.FAILED]

    @property
    def succeeded(self) -> bool:
        """Whether the role has succeeded, perhaps with failed replicas that it tolerates."""
        return self.work.finished is AppState.SUCCEEDED or self.policy.succeeded(
            self._ids(AppState.SUCCEEDED), self._ids(AppState.FAILED)
        )


def evaluate(roles: Sequence[KubernetesRole], rules: Rules) -> KubernetesStatus:
    """Compute the state of an app from its roles."""
    everyone = [one for role in roles for one in role.replicas]
    pods = [one for each in everyone for one in each.attempts if one.lives]
    failed = sorted((one for role in roles for one in role.failed), key=KubernetesReplica.place)
    awaited = outcome.awaited(roles)
    succeeded = all(role.succeeded for role in awaited)
    done = max((one.failed_at for role in awaited for one in role.replicas), default=0.0)
    before = [one for one in failed if one.failed_at < done]
    gone = next((role for role in roles if role.work.finished is AppState.FAILED and not role.succeeded), None)
    stuck = next(((each, one) for each in everyone for one in each.attempts if _is_stuck(one, rules)), None)
    cause, decision, is_due = None, rules.ended, True
    if rules.ended and rules.ended.state is AppState.FAILED:
        cause = failed[0] if failed else None
    elif succeeded and not before:
        decision = Ended(AppState.SUCCEEDED)
    elif rules.ended:
        pass
    elif failed or gone:
        cause = failed[0] if failed else None
        decision = Ended(
            AppState.FAILED, cause.failure if cause else f"role {gone.name} failed: {gone.work.word}" if gone else ""
        )
        is_due = rules.now > (cause.failed_at if cause else 0.0) + rules.grace + SETTLE
    elif stuck:
        decision = Ended(AppState.FAILED, f"replica {stuck[0].role}/{stuck[0].id} cannot start: {stuck[1].waiting}")
    if decision is not None:
        idle = [one for one in pods if not one.stopping and not one.deleting]
        if not pods and not any(role.work.exists and role.work.finished is None for role in roles):
            return KubernetesStatus(decision.state, decision.msg, cause, decided=done if succeeded else 0.0)
        pending_decision = decision if is_due and (idle or any(role.open for role in roles)) else None
        return KubernetesStatus(AppState.RUNNING, decision.msg, cause, pending_decision)
    running = any(one.state is AppState.RUNNING for one in everyone)
    return KubernetesStatus(AppState.RUNNING if running else AppState.PENDING, _waiting(roles))


def _is_stuck(one: Attempt, rules: Rules) -> bool:
    return one.stuck_since > 0 and rules.now > one.stuck_since + rules.pull_timeout


def _waiting(roles: Sequence[KubernetesRole]) -> str:
    """Describe in one line what the first waiting replica, or else a role's job, waits for; empty if none waits."""
    waiting = [(each, each.last.waiting) for role in roles for each in role.replicas if each.last and each.last.waiting]
    if waiting:
        first, why = waiting[0]
        more = f" (and {len(waiting) - 1} more replicas wait)" if len(waiting) > 1 else ""
        return f"replica {first.role}/{first.id}: {why}{more}"
    return next((f"role {role.name} {role.work.word}" for role in roles if role.work.word), "")


def root_cause(roles: Sequence[KubernetesRole]) -> str:
    """Return the error file of the root cause as JSON text; empty if no host has left an error file.

    This need not be the error of the first failed replica, which leaves none if it was killed. Secondary failures count
    only without a primary one.
    """
    said = [
        (*each.place(), each.id, each.last.said)
        for role in roles
        for each in role.replicas
        if each.state is AppState.FAILED and each.last and each.last.error
    ]
    return min(said)[-1] if said else ""


def seconds(text: str) -> float:
    """Convert a Kubernetes time such as ``2026-11-20T10:11:12Z`` to seconds since the epoch; 0.0 for an empty text."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0
