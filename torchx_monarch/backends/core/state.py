# SPDX-License-Identifier: BSD-3-Clause
"""Decide an app's state, its root cause, and whether what still runs must be ended. The rules, for all backends:

- An app has succeeded when every role has (``LocalScheduler.describe`` of torchx.schedulers.local_scheduler: RUNNING
  while a replica of any role lives, FAILED if one has failed, else SUCCEEDED). The app does not wait for sidecars
  (``model.role_spec``): they are ended when all other roles have succeeded.
- A role has failed when one of its replicas has failed for good, with no retries left. A role with ``min_replicas``
  tolerates failed replicas, other than replica 0, while enough others run or have succeeded.
- A group, a role with ``min_groups``, may fail while as many groups as that number have not.
- An app has failed when another role has failed. A sidecar's failure counts until all other roles have succeeded.
- The state is terminal only when nothing of the app runs or may still start. When the outcome is decided before that,
  the rest has ``SETTLE`` seconds to end by itself. Then the app's owner stops it: its supervisor, Slurm's batch step,
  the task of a batch system that has decided it, or ``schedulers.owner``. No reader stops anything.

No rule needs the time: the clock of a reader may differ from that of the machines that report to it.

Standard library only: the local supervisor and Slurm's batch step import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import LOOPBACK, RetryPolicy
from torchx_monarch.model.state import State

SETTLE = 5.0
"""Seconds that the other replicas of a failed app have to end by themselves: hosts usually do, by the job's result."""

HOST_EXTRA = 10.0
"""Seconds that a host has beyond the grace period, in which it ends its ranks and writes its result."""

MAX_HOST_DELAY = 30.0
"""Maximum seconds until a lost host starts again; the others wait for it (``--rejoin-timeout``, 60 s by default)."""


@dataclass(frozen=True)
class AppStatus:
    """The state of an app.

    Attributes:
        state: the state; terminal only when nothing of the app runs or may still start.
        message: why it ended or what it waits for, for users; may be empty.
        cause: the replica that is the root cause; None if the app has not failed, or not because of a replica.
        error: the content of the root cause's error file, as JSON text; empty without one.
        outcome: how the app has ended or is to end; None if that is not decided yet.
        decided: when the app succeeded, in seconds since the epoch; 0 if it has not.
    """

    state: State
    message: str = ""
    cause: ReplicaSnapshot | None = None
    error: str = ""
    outcome: Outcome | None = None
    decided: float = 0.0

    def state_of(self, replica: ReplicaSnapshot) -> State:
        """Return the state of a replica for users: CANCELLED, not FAILED, if it ended because the app had ended."""
        if replica.state in (State.SUCCEEDED, State.UNKNOWN) or not self.state.is_terminal:
            return replica.state
        if self.state is State.FAILED:
            return replica.state if replica.state.is_terminal else State.FAILED
        if self.state is State.SUCCEEDED and replica.state is State.FAILED and replica.ended <= self.decided:
            return replica.state  # the role tolerated it
        return State.CANCELLED


def awaited(roles: Sequence[RoleSnapshot]) -> list[RoleSnapshot]:
    """Return the roles that must succeed for the app to succeed: all but sidecars, or all if every role is one."""
    return [role for role in roles if not role.spec.sidecar] or list(roles)


def reduce(app: AppSnapshot) -> AppStatus:
    """Decide the state of an app from what its backend knows of it."""
    status, native = _from_replicas(app), app.native
    if native is None:
        return status
    if native.state is State.FAILED:
        message = _with_notes(native.message, app) if native.message else status.message
        error = _error(app) if native.error is None else native.error
        return replace(status, state=native.state, message=message, error=error, outcome=native)
    if native.state.is_terminal:
        return AppStatus(native.state, _with_notes(native.message, app), outcome=native, decided=status.decided)
    message = _with_notes(native.message, app) or status.message
    return replace(status, state=native.state, message=message, outcome=None)


def pending_stop(app: AppSnapshot) -> Outcome | None:
    """Return how an app ends if that is decided, and replicas run on that nobody has asked to stop; else None.

    Its owner stops them ``SETTLE`` seconds later.
    """
    status = reduce(app)
    is_cancelled = app.ending is not None and app.ending.state is State.CANCELLED
    left = any(replica.is_alive and not replica.is_stopping for replica in app.replicas)
    return status.outcome if left and not is_cancelled and not status.state.is_terminal else None


def _from_replicas(app: AppSnapshot) -> AppStatus:
    """Decide the state of an app from its replicas, whatever the backend's own controller says of the app."""
    lost = _tolerated_groups(app)
    needed = replace(app, roles=[role for role in app.roles if role not in lost])
    failures = sorted(
        (failure for role in needed.roles for failure in role.failures), key=lambda failure: failure.distance
    )
    outcome = _decide(needed, failures)
    if outcome is None:
        running = any(replica.state is State.RUNNING for replica in app.replicas)
        notes = "; ".join(filter(None, (_waiting(needed), _lost_groups(app, lost, "go on"), _lighthouse(app))))
        return AppStatus(State.RUNNING if running else State.PENDING, _with_notes(notes, app))
    if outcome.state is State.SUCCEEDED:
        outcome = replace(outcome, message=outcome.message or _lost_groups(app, lost, "have succeeded"))
    message = outcome.message
    if outcome.state is State.SUCCEEDED and any(replica.is_alive for replica in app.replicas):
        message = f"{message or 'it has succeeded'}; what still runs is ended"
    return AppStatus(
        state=outcome.state if _is_idle(app) else State.RUNNING,
        message=_with_notes(message, app),
        cause=failures[0] if failures and outcome.state is State.FAILED else None,
        error=_error(app) if outcome.state is State.FAILED else "",
        outcome=outcome,
        decided=outcome.time if outcome.state is State.SUCCEEDED else 0.0,
    )


def _tolerated_groups(app: AppSnapshot) -> list[RoleSnapshot]:
    """Return the groups that cannot go on, if enough others can; else none."""
    groups = [role for role in app.roles if role.spec.min_groups]
    lost = [role for role in groups if not role.has_succeeded and (role.failures or role.stuck or role.has_failed)]
    return lost if lost and len(groups) - len(lost) >= groups[0].spec.min_groups else []


def _lost_groups(app: AppSnapshot, lost: Sequence[RoleSnapshot], others: str) -> str:
    """Describe the groups without which the app goes on or has succeeded; empty if there are none."""
    if not lost:
        return ""
    reason = next((failure.failure for role in lost for failure in role.failures if failure.failure), "")
    groups = sum(role.spec.min_groups > 0 for role in app.roles)
    names = ", ".join(role.spec.name for role in lost)
    return f"{groups - len(lost)} of {groups} groups {others}, without {names}{f': {reason}' if reason else ''}"


def _lighthouse(app: AppSnapshot) -> str:
    """Return where the dashboard of torchft's lighthouse is; empty if none runs."""
    for role in app.roles:
        for replica in role.replicas if role.spec.lighthouse_port else ():
            if replica.state is State.RUNNING:
                on_network = any(other.spec.rendezvous for other in app.roles)
                host = (replica.address or replica.hostname) if on_network else LOOPBACK
                return f"lighthouse: http://{host}:{role.spec.lighthouse_port}"
    return ""


def _is_idle(app: AppSnapshot) -> bool:
    return not any(replica.is_alive for replica in app.replicas)


def _decide(app: AppSnapshot, failures: Sequence[ReplicaSnapshot]) -> Outcome | None:
    """Return how an app ends; None if that is not decided yet. The first rule that applies decides.

    Args:
        failures: the failed replicas that no role tolerates, the root cause first.
    """
    ending, roles = app.ending, awaited(app.roles)
    if ending is not None and ending.state is State.FAILED:
        return replace(ending, message=ending.message or (failures[0].failure if failures else ""))
    if roles and all(role.has_succeeded for role in roles):
        decided = max((replica.ended for role in roles for replica in role.replicas), default=0.0)
        if not any(replica.ended < decided for replica in failures):
            return Outcome(State.SUCCEEDED, time=decided)
    if ending is not None:
        return ending
    if failures:
        return Outcome(State.FAILED, failures[0].failure, time=failures[0].ended)
    for role in app.roles:
        if role.has_failed:
            return Outcome(State.FAILED, f"role {role.spec.name} failed: {role.reason}")
    for stuck in (replica for role in app.roles for replica in role.stuck):
        return Outcome(State.FAILED, f"replica {stuck.name} cannot start: {stuck.waiting}")
    # Nothing runs any more, and exit codes are lost.
    begun = any(replica.started or replica.ended or replica.state is State.UNKNOWN for replica in app.replicas)
    return Outcome(State.FAILED) if begun and _is_idle(app) else None


def root_cause(failed: Sequence[ReplicaSnapshot]) -> tuple[ReplicaSnapshot | None, str]:
    """Choose the root cause among replicas that have failed.

    Returns:
        The replica, None without any; and the error file that is nearest to the root cause, which need not be that of
        the replica, because a killed replica leaves none, or only a substitute that a backend has made of its exit
        code. Empty if no replica has left one.
    """
    ordered = sorted(failed, key=lambda replica: replica.distance)
    errors = [replica.error for replica in ordered if replica.error]
    written = (error for error in errors if HostResult.from_text(error).names_cause)
    return (ordered[0] if ordered else None), next(written, errors[0] if errors else "")


def _error(app: AppSnapshot) -> str:
    decisive = [replica for role in app.roles for replica in role.failures]
    return root_cause(decisive or [replica for replica in app.replicas if replica.state is State.FAILED])[1]


def _waiting(app: AppSnapshot) -> str:
    """Describe in one line what the first waiting replica, or else a role, waits for; empty if none waits."""
    waiting = [replica for replica in app.replicas if replica.waiting]
    if waiting:
        more = f" (and {len(waiting) - 1} more replicas wait)" if len(waiting) > 1 else ""
        return f"replica {waiting[0].name}: {waiting[0].waiting}{more}"
    return next((f"role {role.spec.name} {role.reason}" for role in app.roles if role.reason), "")


def _with_notes(message: str, app: AppSnapshot) -> str:
    return "; ".join(dict.fromkeys(filter(None, (message, *app.notes))))


def count_restarts(app: AppSnapshot) -> int:
    """Count how often an app was restarted; count restarts that one replica's failure has caused in others as one."""
    ranks = sum(replica.rank_restarts for replica in app.replicas)
    if app.events:
        from torchx_monarch.insight.timeline import count_rank_restarts  # not in a supervisor, which reads no events

        ranks += count_rank_restarts(app.events)
    if app.restarts is not None:
        return app.restarts + ranks
    alone, together = 0, 0
    for role in app.roles:
        counts = [replica.restarts for replica in role.replicas] or [0]
        if role.spec.ends_together:
            together = max(together, *counts)
        elif role.spec.retry_policy is RetryPolicy.REPLICA:
            alone += sum(counts)
        else:
            alone += max(counts)
    return alone + together + ranks
