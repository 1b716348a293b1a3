# SPDX-License-Identifier: BSD-3-Clause
"""What is known of a job: state, phase, attempt, hosts and ranks, failures, logs, command.

``torchx monarch status`` and ``ls`` show it, and TorchX's own ``status`` a line of it. A fact that nobody knows is
None, never a guess.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.backends.core.state import AppStatus, count_restarts, root_cause
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.command.command import Command
from torchx_monarch.command.rank_command import rank_command
from torchx_monarch.insight.events import PHASE_AFTER, Event
from torchx_monarch.insight.log_lines import host_text
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.insight.summary import Summary
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import shell_code
from torchx_monarch.model.state import State
from torchx_monarch.system.untrusted_text import one_line

PHASES = {
    "queued": "waits to start",
    "hosts": "waits for its hosts",
    "ranks": "its hosts are there; ranks start",
    "running": "ranks run",
    "stopping": "ranks are stopped",
    "restarting": "ranks are started again",
    "ready": "ready for clients",
}
"""The phases of a job that has not ended, with their descriptions."""

_OTHER_NAMES = {"queue": "queued", "idle": "ready"}
_WITHOUT_PHASE = frozenset({"submitted", "hang", "hang_end", "result"})
"""The kinds of events that begin a phase in reports alone."""

_PHASE_AFTER = {
    **{kind: _OTHER_NAMES.get(phase, phase) for kind, phase in PHASE_AFTER.items() if kind not in _WITHOUT_PHASE},
    "rank_restart": "restarting",
}
"""The phase that begins with an event, by the event's kind."""

_FAILURES = ("failure", "preempted", "result", "replica_exited", "role_ended")
"""The kinds of events that tell of a failure, unless they have exit code 0; the nearer to its reason, the earlier."""

_RESTARTS = frozenset({"rank_restart", "restart", "requeue", "replacement"})
"""The kinds of events that tell what was done after a failure. Some name its reason."""

_STARTS = frozenset({"job_started", "replica_started", "ranks"})

_COUNTED_FROM = frozenset({"job_started", "restart", "requeue", "run", "run_end"})
"""The kinds of events after which attempts are counted from 1."""

_HANG_ENDS = frozenset({"hang_end", "ranks", "failure", "preempted", *_RESTARTS, "run_end", "result"})
"""The kinds of events after which ranks that hung do not hang any more, unless they were stopped."""

# A rank can print such lines: int() raises ValueError above 4,300 digits.
_PROGRESS = (
    ("hosts", re.compile(r"hosts (?P<count>\d{1,9})/\d+")),
    ("ranks", re.compile(r"ranks (?P<count>\d{1,9})/\d+")),
    ("output", re.compile(r"first output")),
    ("rank_restart", re.compile(r"restart \d+ of (?P<max_restarts>\d{1,9}) after: (?P<reason>.*)")),
    ("rank_restart", re.compile(r"host \d+ \(.*\) takes the place of host \d")),
    ("spares", re.compile(r"spare: host \d|no spare host is left")),
    ("excluded", re.compile(r".* is excluded(: | after \d)")),
    ("failure", re.compile(r"rank \d+ \(.*\) (exited with|was killed)")),
    ("breakpoint", re.compile(r"rank (?P<rank>\d{1,9}) waits at .*\. Debug it: ")),
    ("breakpoint_end", re.compile(r"rank (?P<rank>\d{1,9}) [a-z]")),
    ("hang", re.compile(r"hang: ranks? \d")),
    ("hang_end", re.compile(r"hang over: ")),
    ("run_end", re.compile(r"run (?P<run>\d{1,9}) (SUCCEEDED|FAILED|STOPPED): ")),
    ("run", re.compile(r"run (?P<run>\d{1,9}): ")),
    ("result", re.compile(r"(SUCCEEDED|FAILED|STOPPED): .* \(\d+\.\d\d s\)$")),
)
"""The kinds of events, and the host's progress lines (``insight.progress``) that stand for them where there is no file
of events; a named group is a field of the event."""

_SPARE_HOST = re.compile(r"host \d+ \((.*?), pid \d+\)")


@dataclass(frozen=True)
class Failure:
    """A failure that a job has noticed, in one line; its time is 0 if that is not known."""

    time: float
    message: str


@dataclass(frozen=True)
class RoleCommand:
    """A role, the number of its replicas, and its command as typed in a shell."""

    role: str
    replicas: int
    command: str


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
    last_runs: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job, with the fields that docs/reference/json.md describes.

    Attributes:
        summary: the last screen of a command that has waited for the job; None if it has not ended, or is not needed.
        from_log: whether phase, attempt, hosts, ranks, failures and hang are of the progress lines in the log, which
            ranks can imitate.
    """

    handle: str
    name: str
    state: str
    message: str = ""
    phase: str | None = None
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    elapsed: float | None = None
    exit_code: int | None = None
    attempt: int | None = None
    attempts: int | None = None
    restarts: int = 0
    hosts: int | None = None
    spares: Sequence[str] = ()
    excluded: Sequence[Failure] = ()
    ranks: int | None = None
    last_failure: Failure | None = None
    hang: Failure | None = None
    breakpoints: Sequence[Failure] = ()
    last_output: float | None = None
    log_folder: str | None = None
    roles: Sequence[RoleCommand] = field(default_factory=tuple)
    live: LiveState | None = None
    activity: Sequence[RankView] | None = None
    summary: Summary | None = None
    from_log: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return State(self.state).is_terminal

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON values; the summary is for people."""
        values = asdict(self)
        del values["summary"]
        return values


_Commands = Sequence[tuple[int, Command | None]]
"""The number of replicas and the command of each role; None for a command that starts no ranks."""


def build(
    handle: str,
    app: AppSnapshot,
    status: AppStatus,
    *,
    now: float | None = None,
    log_folder: str = "",
    live: LiveState | None = None,
    from_log: bool = False,
) -> JobStatus:
    """Derive the status of a job from what its backend, its events and its hosts tell.

    Args:
        from_log: whether ``events_of`` has made the events of a log: they are shown, and decide nothing.
    """
    now, happened = time.time() if now is None else now, app.events
    roles = app.app.roles if app.app is not None else []
    commands = [(role.num_replicas, rank_command(role)) for role in roles]
    ended = _ended(app, status) if status.state.is_terminal else None
    started = app.started or min((replica.started for replica in app.replicas if replica.started), default=None)
    since = started or app.created or None
    attempt, attempts = _attempt(happened, commands)
    return JobStatus(
        handle=handle,
        name=app.name,
        state=status.state.value,
        message=one_line(status.message),
        phase=None if status.state.is_terminal else _phase(status, happened, live),
        submitted=app.created or None,
        started=started,
        ended=ended,
        elapsed=max(0.0, (ended or now) - since) if since and (ended or not status.state.is_terminal) else None,
        exit_code=_exit_code(app, status),
        attempt=attempt,
        attempts=attempts,
        restarts=count_restarts(app),
        hosts=_hosts(app, happened),
        spares=() if status.state.is_terminal else _spares(happened),
        excluded=_excluded(happened),
        ranks=_ranks(happened, commands),
        last_failure=_last_failure(happened),
        hang=None if status.state is State.SUCCEEDED else _hang(happened),
        breakpoints=_breakpoints(happened, status),
        log_folder=log_folder or None,
        roles=[
            RoleCommand(one_line(role.name), role.num_replicas, one_line(shlex.join([role.entrypoint, *role.args])))
            for role in roles
        ],
        live=live,
        from_log=from_log and bool(happened),
    )


def _excluded(happened: Sequence[Event]) -> list[Failure]:
    found = (event for event in happened if event["kind"] == "excluded")
    return [Failure(event["time"], one_line(event["message"])) for event in found]


def events_of(lines: Iterable[TimedLine]) -> list[Event]:
    """Return the events that the progress lines in a host's log stand for.

    A rank can print such lines, too: they suit display only.
    """
    found: list[Event] = []
    for line in lines:
        text = host_text(line.text.rstrip("\n")) or ""
        for kind, pattern in _PROGRESS:
            if match := pattern.match(text):
                fields = {name: int(word) if word.isdecimal() else word for name, word in match.groupdict().items()}
                if kind == "spares":
                    fields["hosts"] = _SPARE_HOST.findall(text)
                found.append({"time": line.time, "kind": kind, "message": text, **fields})
                break
    return found


def in_one_line(status: JobStatus, now: float | None = None) -> str:
    """Return the facts of a job as one line; empty if there is none beyond its state."""
    now = time.time() if now is None else now
    parts = [status.message]
    if status.phase is not None and not status.message:
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
    parts += [waiting.message for waiting in status.breakpoints[:1]]
    if status.last_failure is not None and not status.has_ended:
        ago = f" {now - status.last_failure.time:.0f} s ago" if status.last_failure.time else ""
        parts.append(f"last failure{ago}: {status.last_failure.message}")
    return "; ".join(filter(None, parts))


def with_hang(message: str, happened: Sequence[Event]) -> str:
    """Return why a job was ended, with the hang that its ranks were in."""
    hang = _hang(happened)
    return "; ".join(filter(None, (message, f"hang: {hang.message}" if hang is not None else "")))


def _phase(status: AppStatus, happened: Sequence[Event], live: LiveState | None) -> str | None:
    if status.state is State.PENDING:
        return "queued"
    if live is not None and live.ready:
        return "running" if live.run is not None else "ready"
    return next((_PHASE_AFTER[event["kind"]] for event in reversed(happened) if event["kind"] in _PHASE_AFTER), None)


def _ended(app: AppSnapshot, status: AppStatus) -> float | None:
    decided = status.outcome.time if status.outcome is not None else 0.0
    return max([decided, *(replica.ended for replica in app.replicas)], default=0.0) or None


def _exit_code(app: AppSnapshot, status: AppStatus) -> int | None:
    if status.state is not State.FAILED:
        return 0 if status.state is State.SUCCEEDED else None
    code = HostResult.from_text(status.error).code
    cause = status.cause or root_cause([replica for replica in app.replicas if replica.state is State.FAILED])[0]
    if code is None and cause is not None:
        code = cause.exit_code
    return None if code is None else shell_code(code)


def _attempt(happened: Sequence[Event], commands: _Commands) -> tuple[int | None, int | None]:
    """Return the number of the present attempt and how many are allowed."""
    first = next((command for _, command in commands if command is not None and command.kind == "torchrun"), None)
    attempts = first.options.max_restarts + 1 if first is not None else None
    # A run, and a restart of the hosts, begin to count anew.
    begun = max((at for at, event in enumerate(happened) if event["kind"] in _COUNTED_FROM), default=0)
    seen = [event for event in happened[begun:] if event["kind"] in ("ranks", "rank_restart")]
    # A restart on a spare host, in the place of a lost one, is none of those that are allowed.
    allowed = [int(event["max_restarts"]) for event in seen if "max_restarts" in event]
    return 1 + len(allowed) if seen else None, allowed[-1] + 1 if allowed else attempts


def _hosts(app: AppSnapshot, happened: Sequence[Event]) -> int | None:
    """Return the number of hosts of the last attempt; before it, what was asked for, without spare hosts."""
    counts = {event.get("role"): event.get("count") for event in happened if event["kind"] == "hosts"}
    asked = {role.spec.name: len(role.replicas) - role.spec.spares for role in app.roles}
    if len(asked) == 1 and None in counts:  # the lines of a log do not name the role
        counts = dict.fromkeys(asked, counts[None])
    hosts = sum(counts.get(name) or count for name, count in asked.items())
    return hosts or (sum(role.num_replicas for role in app.app.roles) if app.app else 0) or None


def _spares(happened: Sequence[Event]) -> list[str]:
    latest = {event.get("role"): event.get("hosts") for event in happened if event["kind"] == "spares"}
    return [one_line(str(name)) for hosts in latest.values() if isinstance(hosts, list) for name in hosts]


def _ranks(happened: Sequence[Event], commands: _Commands) -> int | None:
    """Return the number of ranks that were started last; before that, what the commands ask for."""
    started: dict[str | None, int] = {
        event.get("role"): event["count"] for event in happened if event["kind"] == "ranks" and "count" in event
    }
    if started:
        return sum(started.values())
    asked = [(replicas, command.ranks_per_host if command is not None else None) for replicas, command in commands]
    known = all(ranks is not None for _, ranks in asked)
    return sum(replicas * (ranks or 0) for replicas, ranks in asked) or None if known else None


def _last_failure(happened: Sequence[Event]) -> Failure | None:
    last: Failure | None = None
    failed: list[Event] = []  # since the last start
    for event in happened:
        if event["kind"] in _STARTS:
            failed = []
        elif event["kind"] in _RESTARTS:
            cause, text = event, event.get("reason")
            if not isinstance(text, str):
                cause = min(failed, key=lambda failure: _FAILURES.index(failure["kind"]), default=event)
                text = cause["message"].removeprefix("FAILED: ")
            last = Failure(cause["time"], one_line(text))
        elif event["kind"] in _FAILURES and not event.get("stopped") and event.get("exit_code", event.get("code")) != 0:
            failed.append(event)
            if event["kind"] in ("failure", "preempted"):
                last = Failure(event["time"], one_line(event["message"]))
    return last


def _hang(happened: Sequence[Event]) -> Failure | None:
    events = (event for event in reversed(happened) if not event["message"].startswith("STOPPED: "))
    last = next((event for event in events if event["kind"] in ("hang", *_HANG_ENDS)), None)
    if last is None or last["kind"] != "hang":
        return None
    return Failure(last["time"], one_line(last["message"]).removeprefix("hang: "))


def _breakpoints(happened: Sequence[Event], status: AppStatus) -> list[Failure]:
    waiting: dict[tuple[object, object], Failure] = {}
    for event in () if status.state.is_terminal else happened:
        role, rank = event.get("role"), event.get("rank")
        if event["kind"] in ("ranks", "rank_restart", "run_end"):
            waiting = {key: place for key, place in waiting.items() if key[0] != role}
        elif event["kind"] == "breakpoint":
            waiting[role, rank] = Failure(event["time"], one_line(event["message"]))
        elif event["kind"] == "breakpoint_end":
            waiting.pop((role, rank), None)
    return list(waiting.values())
