# SPDX-License-Identifier: BSD-3-Clause
"""What is known of a job: state, phase, attempt, hosts and ranks, failures, logs, command.

``torchx monarch status`` and ``ls`` show it, and TorchX's own ``status`` a line of it. A fact that nobody knows is
None, never a guess.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.backends.core.state import AppStatus, count_restarts, root_cause
from torchx_monarch.command.command import Command
from torchx_monarch.command.rank_command import rank_command
from torchx_monarch.insight import account
from torchx_monarch.insight.account import Account
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.insight.slowness import Slowness
from torchx_monarch.insight.summary import Summary, local_path, show_restarts, show_shape
from torchx_monarch.insight.timeline import PHASES, Moment, RoleView, Timeline
from torchx_monarch.insight.timeline import build as build_timeline
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import shell_code
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.system.untrusted_text import one_line

_SLOW_START = 2.0
"""Seconds between the start of a rank and its first process group that are worth a hint."""


@dataclass(frozen=True)
class RoleCommand:
    """A role, the number of its replicas, and its command as typed in a shell."""

    role: str
    replicas: int
    command: str


@dataclass(frozen=True)
class ReplicaState:
    """A replica, with the fields of ``replicas`` in docs/reference/json.md."""

    role: str
    replica: int
    state: str
    host: str
    exit_code: int | None
    restarts: int


@dataclass(frozen=True)
class LiveState:
    """What the hosts of a live allocation answer, with the fields of ``live`` in docs/reference/json.md."""

    ready: bool
    hosts: int
    run: int | None
    runs: int
    queued: int
    idle: float
    idle_timeout: float
    last_runs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class MetricTrend:
    """A metric that a rank has reported, with the fields of ``metrics`` in docs/reference/json.md."""

    name: str
    last: float
    trend: str


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job, with the fields that docs/reference/json.md describes.

    Attributes:
        cause: why it has ended, with the rank; after a success what else there is to say; empty before the end.
        traceback: the Python traceback of the root cause.
        log: the log of the root cause, or else the folder of all logs, on this machine, or where a browser shows them.
        hint: what would make it faster.
        next: commands to type next.
    """

    handle: str
    name: str
    state: str
    message: str = ""
    cause: str = ""
    traceback: str = ""
    log: str | None = None
    hint: str = ""
    next: Sequence[str] = ()
    phase: str | None = None
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    elapsed: float | None = None
    exit_code: int | None = None
    attempt: int | None = None
    attempts: int | None = None
    restarts: int = 0
    replicas: Sequence[ReplicaState] | None = None
    hosts: int | None = None
    spares: Sequence[str] = ()
    checkpoint_bytes: int | None = None
    persist_failure: Moment | None = None
    excluded: Sequence[Moment] = ()
    ranks: int | None = None
    last_failure: Moment | None = None
    hang: Moment | None = None
    slow: Slowness | None = None
    silent: Moment | None = None
    breakpoints: Sequence[Moment] = ()
    last_output: float | None = None
    log_folder: str | None = None
    roles: Sequence[RoleCommand] = field(default_factory=tuple)
    live: LiveState | None = None
    activity: Sequence[RankView] | None = None
    step: int | None = None
    metrics: Sequence[MetricTrend] = ()
    account: Account | None = None

    @property
    def has_ended(self) -> bool:
        return State(self.state).is_terminal

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> Summary:
        """Return the last screen of a command that has waited for the job."""
        facts = [show_restarts(self.restarts)]
        if self.hosts is not None:
            per_host = self.ranks // self.hosts if self.ranks is not None and not self.ranks % self.hosts else None
            facts.insert(0, show_shape(self.hosts, per_host))
        return Summary(
            self.state,
            self.handle,
            self.elapsed,
            cause=self.cause,
            traceback=self.traceback,
            log=self.log or "",
            ran=", ".join(facts),
            hint=self.hint,
            next=self.next,
        )


def timeline_of(app: AppSnapshot, status: AppStatus, now: float) -> Timeline:
    """Return the timeline of a job until its end, or until now."""
    started = _started(app) or 0.0
    return build_timeline(
        app.events,
        [role.spec for role in app.roles],
        start=app.created or started,
        started=started,
        are_all=not any(replica.restarts for replica in app.replicas),
        end=(_ended(app, status) if status.state.is_terminal else None) or now,
    )


def build(
    handle: str,
    app: AppSnapshot,
    status: AppStatus,
    *,
    now: float | None = None,
    timeline: Timeline | None = None,
    live: LiveState | None = None,
) -> JobStatus:
    """Derive the status of a job from what its backend and its hosts tell.

    Args:
        timeline: its timeline; None for that of the app's events.
    """
    now = time.time() if now is None else now
    timeline = timeline_of(app, status, now) if timeline is None else timeline
    roles = app.app.roles if app.app is not None else []
    commands = {role.name: rank_command(role) for role in roles}
    ended, started = _ended(app, status) if status.state.is_terminal else None, _started(app)
    since = started or app.created or None
    shown = _present_role(timeline, app)
    (folder, logs), result = log_folder(app), HostResult.from_text(status.error)
    attempt = shown.attempt if shown is not None and shown.ranks is not None else None  # a command has none
    return JobStatus(
        handle=handle,
        name=app.name,
        state=status.state.value,
        message=one_line(status.message),
        cause=_cause(app, status, timeline, result) if status.state.is_terminal else "",
        traceback=result.traceback if status.state is State.FAILED else "",
        log=(local_path(result.log) if status.state is State.FAILED else "") or logs or None,
        hint=_hint(timeline) if status.state is State.SUCCEEDED else "",
        next=_next(handle, app, status, result) if status.state.is_terminal else (),
        phase=_phase(app, status, shown),
        submitted=app.created or None,
        started=started,
        ended=ended,
        elapsed=max(0.0, (ended or now) - since) if since and (ended or not status.state.is_terminal) else None,
        exit_code=_exit_code(app, status, result),
        attempt=attempt.number if attempt is not None else None,
        attempts=_attempts(shown, commands),
        restarts=count_restarts(app),
        replicas=[
            ReplicaState(
                role=one_line(replica.role),
                replica=replica.id,
                state=status.state_of(replica).value,
                host=one_line(replica.hostname),
                exit_code=None if replica.exit_code is None else shell_code(replica.exit_code),
                restarts=replica.restarts,
            )
            for replica in app.replicas
        ],
        hosts=_hosts(app, timeline),
        spares=() if status.state.is_terminal else [name for role in timeline.roles for name in role.spares],
        checkpoint_bytes=max(
            (role.checkpoint_bytes for role in timeline.roles if role.checkpoint_bytes and ended is None), default=None
        ),
        persist_failure=next((role.persist_failure for role in timeline.roles if role.persist_failure), None),
        excluded=[moment for moment in timeline.moments if moment.kind == "excluded"],
        ranks=_ranks(app, timeline, commands),
        last_failure=max((role.failure for role in timeline.roles if role.failure), key=lambda m: m.time, default=None),
        hang=None if status.state is State.SUCCEEDED else timeline.hang,
        slow=next((role.slow.shown(now) for role in timeline.roles if role.slow and ended is None), None),
        breakpoints=[place for role in timeline.roles if ended is None for place in role.breakpoints.values()],
        log_folder=folder or None,
        roles=[
            RoleCommand(one_line(role.name), role.num_replicas, one_line(shlex.join([role.entrypoint, *role.args])))
            for role in roles
        ],
        live=live,
        account=account_of(app, timeline, has_failed=status.state in (State.FAILED, State.CANCELLED)),
    )


def account_of(
    app: AppSnapshot, timeline: Timeline, activity: Sequence[RankView] = (), *, has_failed: bool = False
) -> Account | None:
    """Return the account of the first role of ranks, whose runs are not jobs of their own, as those of an allocation.

    ``activity`` is what its ranks do.
    """
    specs = (role.spec for role in app.roles if role.spec.workload is not WorkloadKind.ALLOCATION)
    role = next((spec.name for spec in specs if spec.has_ranks), None)
    reported = (rank.progress for rank in activity if rank.progress is not None)
    present = min(reported, key=lambda progress: progress.step, default=None)
    return None if role is None else account.build(timeline, role, present, has_failed=has_failed)


def _cause(app: AppSnapshot, status: AppStatus, timeline: Timeline, result: HostResult) -> str:
    parts = [status.message]
    if status.state is State.FAILED and result.reason:
        parts = [result.reason, *app.notes]
    elif status.state is State.CANCELLED and timeline.hang is not None:
        parts.append(f"hang: {timeline.hang.message}")
    parts += [role.persist_failure.message for role in timeline.roles if role.persist_failure is not None]
    return one_line("; ".join(filter(None, parts)))


def _next(handle: str, app: AppSnapshot, status: AppStatus, result: HostResult) -> Sequence[str]:
    """Return the commands that show the log, of the replica of the root cause if there is one, and write a report."""
    replica = ""
    if status.cause is not None:
        ids = {replica.id for replica in app.replicas if replica.role == status.cause.role}
        replica = f"/{status.cause.role}/{result.replica if result.replica in ids else status.cause.id}"
    return f"torchx log {handle}{replica}", f"torchx monarch report {handle} -o job.html"


def _hint(timeline: Timeline) -> str:
    """Return what would start the ranks of a job sooner that took some time to their first process group."""
    ranks = timeline.last_ranks()
    seconds = min((rank.grouped - rank.start for rank in ranks if rank.grouped is not None), default=0.0)
    if seconds < _SLOW_START:
        return ""
    unshared = next((role.unshared for role in timeline.roles if role.unshared), "")
    shared = (
        f"the first statement that they do not share: {one_line(unshared)}"
        if unshared
        else "how they can share imports: docs/how_to/slow_imports.md"
    )
    return f"ranks took {seconds:.1f} s or more until their process group had formed; {shared}"


def log_folder(app: AppSnapshot) -> tuple[str, str]:
    """Return the folder of an app's logs, empty if this machine does not have it, or where a browser shows the app."""
    url = urlsplit(app.ui_url)
    folder = local_path(unquote(url.path) + "/logs") if url.scheme == "file" else ""
    return folder, folder if url.scheme == "file" else app.ui_url


def _started(app: AppSnapshot) -> float | None:
    return app.started or min((replica.started for replica in app.replicas if replica.started), default=None)


def _present_role(timeline: Timeline, app: AppSnapshot) -> RoleView | None:
    """Return the role whose phase is that of the job: of those with ranks, if any, the one whose phase began last."""
    with_ranks = {role.spec.name for role in app.roles if role.spec.has_ranks}
    roles = [role for role in timeline.roles if role.name in with_ranks] or timeline.roles
    return max(roles, key=lambda role: (role.phase.name != "end", role.phase.start), default=None)


def _phase(app: AppSnapshot, status: AppStatus, role: RoleView | None) -> str | None:
    if status.state is State.PENDING:
        return "queued"
    if role is None or status.state.is_terminal or role.phase.name in ("submit", "unknown"):
        return None
    waits = any(role.spec.allocation for role in app.roles)  # for other runs; of another job the events are missing
    return role.phase.name if role.phase.name != "queued" or waits else None


def in_one_line(status: JobStatus, now: float | None = None) -> str:
    """Return the facts of a job as one line; empty if there is none beyond its state."""
    now = time.time() if now is None else now
    parts = [status.message]
    if status.phase is not None and not status.message and status.hang is None:
        parts.append(PHASES[status.phase])
    if status.attempt is not None and (status.attempts or 1) > 1:
        parts.append(f"attempt {status.attempt} of {status.attempts}")
    if status.ranks is not None and status.hosts is not None:
        parts.append(f"{status.ranks} ranks on {status.hosts} host{'s' if status.hosts > 1 else ''}")
    if status.spares:
        parts.append(f"spare: {', '.join(status.spares)}")
    parts += [exclusion.message for exclusion in status.excluded[-1:]]
    if status.hang is not None:
        parts.append(f"hang: {status.hang.message}")
    parts += [status.slow.message] if status.slow is not None else []
    parts += [status.silent.message] if status.silent is not None else []
    parts += [waiting.message for waiting in status.breakpoints[:1]]
    if status.last_failure is not None and not status.has_ended:
        parts.append(f"last failure {now - status.last_failure.time:.0f} s ago: {status.last_failure.message}")
    return "; ".join(filter(None, parts))


def _ended(app: AppSnapshot, status: AppStatus) -> float | None:
    decided = status.outcome.time if status.outcome is not None else 0.0
    return max([decided, *(replica.ended for replica in app.replicas)], default=0.0) or None


def _exit_code(app: AppSnapshot, status: AppStatus, result: HostResult) -> int | None:
    if status.state is not State.FAILED:
        return 0 if status.state is State.SUCCEEDED else None
    code = result.code
    cause = status.cause or root_cause([replica for replica in app.replicas if replica.state is State.FAILED])[0]
    if code is None and cause is not None:
        code = cause.exit_code
    return None if code is None else shell_code(code)


def _attempts(role: RoleView | None, commands: Mapping[str, Command | None]) -> int | None:
    """Return how many attempts there may be: those so far, and the restarts that are left."""
    command = commands.get(role.name) if role is not None else None
    allowed = command.options.max_restarts if command is not None and command.kind == "torchrun" else None
    if role is None or (allowed := allowed if role.max_restarts is None else role.max_restarts) is None:
        return None
    return (role.attempt.number if role.attempt is not None else 1) + allowed - role.restarts


def _hosts(app: AppSnapshot, timeline: Timeline) -> int | None:
    """Return the number of hosts of the last attempt; before it, what was asked for, without spare hosts."""
    asked = {role.spec.name: len(role.replicas) - role.spec.spares for role in app.roles if role.spec.runs_hosts}
    hosts = sum(role.hosts or asked.get(role.name, 0) for role in timeline.roles)
    return hosts or (sum(role.num_replicas for role in app.app.roles) if app.app else 0) or None


def _ranks(app: AppSnapshot, timeline: Timeline, commands: Mapping[str, Command | None]) -> int | None:
    """Return the number of ranks that were started last; before that, what the commands ask for."""
    if started := [role.ranks for role in timeline.roles if role.ranks is not None]:
        return sum(started)
    asked = 0
    for role in app.app.roles if app.app is not None else ():
        command = commands[role.name]
        if command is None or command.ranks_per_host is None:
            return None
        asked += role.num_replicas * command.ranks_per_host
    return asked or None
