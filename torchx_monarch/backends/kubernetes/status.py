# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the API server says of pods and jobs, what that means for a replica, and what follows for the app. Pure.

Who decides the end is said in ``backends.outcome``. The app has ended when nothing of it lives any more.
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
"""Seconds beyond the grace that the rest of a failed app gets to end by itself: its hosts carry the verdict out."""

DEADLINE = 1
"""Seconds from a pod's start: the deadline of one that we have told to end."""

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
"""Why a container waits that kubelet cannot start: it tries again for ever (torchx#207)."""

_LONGEST_LINE = 300


@dataclass(frozen=True)
class Attempt:
    """One pod: one start of one replica.

    Attributes:
        pod: its name.
        container: the name of the container that runs the role's command: the first one.
        host: its host name.
        node: where it runs; empty while it has no place.
        address: the pod's own, while it runs.
        phase: Kubernetes' word.
        created, ended: seconds since the epoch; 0 for not yet.
        deleting: whether it is being deleted.
        stopping: whether it was told to end, by a deadline.
        waiting: why it does not run, where that is more than that it is about to.
        stuck_since: when it became clear that it cannot start as things are; 0 where it may.
        failure: how it failed, in words.
        said: its termination message, where that is an error file (``error_files.cleaned``).
        rank_restarts: how often it has started the ranks again, as far as a container of it that has ended says so.
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
        """Whether something of it runs or may yet run."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def error(self) -> Mapping[str, Any] | None:
        """What a host has left as an error file would have it; None where nobody has."""
        left = read_error_file(self.said)
        return left if isinstance(left.get("message"), dict) else None

    @property
    def is_secondary(self) -> bool:
        """Whether a host has said that it has only lost another, or ended because another had."""
        return is_secondary(self.said)


def attempt(pod: Object) -> Attempt:
    """From the object."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    name = spec["containers"][0].get("name", "")
    # A pod overlay may have added others.
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
    """As one clause."""
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
class Work:
    """What a controller says of one role.

    Attributes:
        exists: whether there is a job that may start replicas.
        finished: how the job has ended; None for not yet.
        succeeded, failed: the indexes of replicas that have for good.
        word: what the job waits for, or why it ended.
    """

    exists: bool
    finished: AppState | None = None
    succeeded: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    word: str = ""


def work_of_job(job: Object | None) -> Work:
    """Of an Indexed Job; None for one that is gone."""
    if job is None:
        return Work(False)
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
    return Work(exists, finished, indexes(status.get("completedIndexes")), indexes(status.get("failedIndexes")), word)


def indexes(text: str | None) -> frozenset[int]:
    """The numbers that a Job's status writes as ``0,2-4``."""
    found: set[int] = set()
    for part in (text or "").split(","):
        low, _, high = part.partition("-")
        if low:
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


@dataclass(frozen=True)
class KubernetesReplica:
    """One replica.

    Attributes:
        attempts: its pods, the oldest first.
        state: of this replica alone.
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
        """Among those that have failed; the first is the cause."""
        return self.last is not None and self.last.is_secondary, self.failed_at

    @property
    def failure(self) -> str:
        """Why it failed, in one line."""
        if self.last is None:
            return f"replica {self.role}/{self.id} failed; its pod is gone"
        where = f" on node {self.last.node}" if self.last.node else ""
        return f"replica {self.role}/{self.id}{where} {self.last.failure}"


def replica(role: str, index: int, attempts: Sequence[Attempt], work: Work, max_retries: int) -> KubernetesReplica:
    """How a replica stands.

    Args:
        attempts: its pods, the oldest first.
        work: what the controller says of its role.
        max_retries: of the role.
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
        state = AppState.PENDING  # it is to be started again
    return KubernetesReplica(role, index, attempts, state)


@dataclass(frozen=True)
class Ended:
    """That one of us has ended the app, from its record."""

    state: AppState
    msg: str = ""


@dataclass(frozen=True)
class KubernetesStatus:
    """How an app stands.

    Attributes:
        state: its state; terminal only when nothing of it lives.
        msg: for people: what it waits for, why it ended; empty when there is nothing to say.
        cause: the replica that failed first; None where none has, or where that is not why it ended.
        unended: how it is decided, where it still lives in part and nobody else is to end that part.
        decided: when it had succeeded, in seconds since the epoch; 0 where it has not.
    """

    state: AppState
    msg: str = ""
    cause: KubernetesReplica | None = None
    unended: Ended | None = None
    decided: float = 0.0


@dataclass(frozen=True)
class Rules:
    """What the standing of an app depends on beside its replicas.

    Attributes:
        now: seconds since the epoch.
        grace: seconds from SIGTERM to SIGKILL.
        pull_timeout: seconds that a pod may be stuck.
        ended: how one of us has ended it.
    """

    now: float
    grace: float
    pull_timeout: float
    ended: Ended | None = None


@dataclass(frozen=True)
class KubernetesRole:
    """One role.

    Attributes:
        name: its own.
        replicas: all of them.
        work: what its controller says.
        policy: what decides how it ends.
    """

    name: str
    replicas: Sequence[KubernetesReplica]
    work: Work
    policy: RolePolicy

    def _ids(self, state: AppState) -> set[int]:
        return {one.id for one in self.replicas if one.state is state}

    @property
    def over(self) -> bool:
        """Whether all of its replicas have ended for good."""
        return all(one.state in (AppState.SUCCEEDED, AppState.FAILED) for one in self.replicas)

    @property
    def open(self) -> bool:
        """Whether there is a job that may go on. One whose replicas are all over only has to say so itself."""
        return self.work.exists and self.work.finished is None and not self.over

    @property
    def failed(self) -> Sequence[KubernetesReplica]:
        """Those of its replicas that have failed for good; none while the role tolerates that."""
        if self.policy.tolerates(self._ids(AppState.FAILED)):
            return ()
        return [one for one in self.replicas if one.state is AppState.FAILED]

    @property
    def succeeded(self) -> bool:
        """Whether it has, perhaps without some whose failure it tolerates."""
        return self.work.finished is AppState.SUCCEEDED or self.policy.succeeded(
            self._ids(AppState.SUCCEEDED), self._ids(AppState.FAILED)
        )


def evaluate(roles: Sequence[KubernetesRole], rules: Rules) -> KubernetesStatus:
    """How an app stands whose roles these are."""
    everyone = [one for role in roles for one in role.replicas]
    pods = [one for each in everyone for one in each.attempts if one.lives]
    failed = sorted((one for role in roles for one in role.failed), key=KubernetesReplica.place)
    awaited = outcome.awaited(roles)
    succeeded = all(role.succeeded for role in awaited)
    done = max((one.failed_at for role in awaited for one in role.replicas), default=0.0)
    before = [one for one in failed if one.failed_at < done]
    gone = next((role for role in roles if role.work.finished is AppState.FAILED and not role.succeeded), None)
    stuck = next(((each, one) for each in everyone for one in each.attempts if _is_stuck(one, rules)), None)
    cause, decision, at_once = None, rules.ended, True
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
        at_once = rules.now > (cause.failed_at if cause else 0.0) + rules.grace + SETTLE
    elif stuck:
        decision = Ended(AppState.FAILED, f"replica {stuck[0].role}/{stuck[0].id} cannot start: {stuck[1].waiting}")
    if decision is not None:
        idle = [one for one in pods if not one.stopping and not one.deleting]
        if not pods and not any(role.work.exists and role.work.finished is None for role in roles):
            return KubernetesStatus(decision.state, decision.msg, cause, decided=done if succeeded else 0.0)
        unended = decision if at_once and (idle or any(role.open for role in roles)) else None
        return KubernetesStatus(AppState.RUNNING, decision.msg, cause, unended)
    running = any(one.state is AppState.RUNNING for one in everyone)
    return KubernetesStatus(AppState.RUNNING if running else AppState.PENDING, _waiting(roles))


def _is_stuck(one: Attempt, rules: Rules) -> bool:
    return one.stuck_since > 0 and rules.now > one.stuck_since + rules.pull_timeout


def _waiting(roles: Sequence[KubernetesRole]) -> str:
    """What those wait for that wait, in one line."""
    waiting = [(each, each.last.waiting) for role in roles for each in role.replicas if each.last and each.last.waiting]
    if waiting:
        first, why = waiting[0]
        more = f" (and {len(waiting) - 1} more replicas wait)" if len(waiting) > 1 else ""
        return f"replica {first.role}/{first.id}: {why}{more}"
    return next((f"role {role.name} {role.work.word}" for role in roles if role.work.word), "")


def root_cause(roles: Sequence[KubernetesRole]) -> str:
    """The error that began the end, as JSON text; empty where no host has said any.

    The first to fail was perhaps killed; one that says only that it has lost another is not the cause if there is one.
    """
    said = [
        (*each.place(), each.id, each.last.said)
        for role in roles
        for each in role.replicas
        if each.state is AppState.FAILED and each.last and each.last.error
    ]
    return min(said)[-1] if said else ""


def seconds(text: str) -> float:
    """Kubernetes' ``2026-11-20T10:11:12Z`` since the epoch; 0.0 for none."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0
