# SPDX-License-Identifier: BSD-3-Clause
"""The timeline of a job: its events as spans of time, from the submission to the end, and what each role does now.

Nothing else knows the kinds of events: ``status``, ``top``, ``report`` and ``wait`` show what is here. The
phases of a role follow each other without a gap, so their durations add up to that of the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, get_args

from torchx_monarch.insight.events import Event, HostStart, RankEnd
from torchx_monarch.insight.group_calls import parse_ranks
from torchx_monarch.insight.slowness import Slowness
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_facts import NodeFault
from torchx_monarch.model.job_result import StepsDone
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.system.untrusted_text import one_line

T = TypeVar("T")

PHASES = {
    "submit": "the job is submitted",
    "queued": "waits to start",
    "hosts": "hosts start and find each other",
    "ranks": "ranks start",
    "first output": "the program runs and has printed nothing",
    "running": "the program runs",
    "hang": "a rank makes the others wait in a collective, or waits inside the kernel",
    "stopping": "the program is stopped",
    "ready": "ready for clients",
    "end": "the hosts end",
    "unknown": "this machine does not see what happens",
}
"""The phases of a role with their descriptions."""

_BEGINS = {
    "queued": ("submitted", "requeue"),
    "hosts": ("supervised", "job_started", "replacement", "restart"),
    "ranks": ("hosts", "run", "rank_restart"),
    "running": ("ranks", "output", "hang_end"),
    "hang": ("hang",),
    "stopping": ("failure", "preempted", "joined", "cancel", "stop"),
    "ready": ("run_end",),
    "end": ("result",),
    "unknown": ("unseen_start",),
}
"""The phases of a role with hosts, and the kinds of events with which they begin."""

_BEGINS_WITHOUT_HOSTS = {
    "queued": ("submitted", "requeue", "restart"),
    "running": ("unseen_start", "job_started", "replica_started"),
    "stopping": ("cancel", "stop"),
}
"""The same of a role whose command runs by itself."""

_BEGINS_ON_ALLOCATION = {
    **_BEGINS,
    "queued": ("submitted", "requeue", "restart"),
    "hosts": ("job_started", "replacement"),
    "ready": (),
    "end": ("run_end",),
}
"""The same of a role that is a run on the hosts of an allocation, which may have other runs before."""

_OF_ATTEMPT = frozenset({"ranks", "first output", "running", "hang", "stopping"})
"""The phases of an attempt; "ranks" is the first of them."""

_FAILURES = ("failure", "preempted", "result", "replica_exited", "role_ended")
"""The kinds of events that tell of a failure, unless they have exit code 0; the nearer to its reason, the earlier."""

_RESTARTS = ("rank_restart", "restart", "requeue", "replacement")
"""The kinds of events that tell what was done after a failure. Some name its reason."""

_MOMENTS = frozenset(
    ("output", "failure", "preempted", "joined", "cancel", "stop", "hang", "result", "ended", "spare_used", "excluded")
    + ("persist_failed", "quiet", "slow", "slow_end", "resize", "replica_spared", "breakpoint", *_RESTARTS)
)
"""The kinds of events that are shown as moments."""

_STARTS = ("job_started", "replica_started", "ranks")
"""The kinds of events after which a failure is another one."""

_COUNTED_FROM = ("job_started", "restart", "requeue", "run")
"""The kinds of events after which attempts are counted from 1."""

_ENDS = ("ranks", "failure", "preempted", "run_end", "result", *_RESTARTS)
"""The kinds of events after which ranks neither hang nor are slow any more, unless a hang has stopped them."""

_RESOLUTION = 1.0
"""Seconds after its end in which a job may have had events: Kubernetes tells ends in whole seconds."""


@dataclasses.dataclass
class Span:
    """Something that took a while.

    Attributes:
        kind: ``job``, ``role``, ``run``, ``attempt``, ``phase``, ``import`` or ``rank``.
        name: its name for people: that of the phase, ``attempt 2``, ``rank 3``.
        end: its end; that of the timeline if it has not ended.
        parent: the span that contains it; None for the job.
        number: the number of the run, of the attempt (from 1), of the rank, or of the replica of an import; 0 for
            other kinds.
        replica: the replica whose host, on the machine ``node``, executes the rank; None for other kinds.
        code: exit code of the rank or the run, -n for death by signal n; None if there is none.
        secondary: whether the rank was stopped, or failed because it lost another rank.
        grouped: when the rank formed its first process group; None for other kinds, or if it is not known.
        log_attempt: N of the log folders ``attempt_N`` of an attempt; None for other kinds, or if it is not known.
        is_recorded: whether the end of the ranks of an attempt is known.
        steps: the steps that all its ranks had done then; None for other kinds, or if they are not known.
        awaited: the ranks for which the others wait in a hang; empty for other spans.
    """

    kind: str
    name: str
    start: float
    end: float
    parent: Span | None = dataclasses.field(default=None, repr=False, compare=False)
    role: str = ""
    number: int = 0
    replica: int | None = None
    node: str = ""
    pid: int | None = None
    code: int | None = None
    secondary: bool = False
    grouped: float | None = None
    log_attempt: int | None = None
    is_recorded: bool = False
    steps: StepsDone | None = None
    awaited: tuple[range, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Moment:
    """Something that happened, to a role or to the whole job: an event that is more than the end of a phase.

    Attributes:
        time: in seconds since the epoch.
        message: one printable line.
        role: empty for the whole job.
    """

    time: float
    kind: str
    message: str
    role: str = ""


@dataclasses.dataclass
class RoleView:
    """What a role does when the timeline ends. A fact that its events do not tell is None or empty.

    Attributes:
        phase: the present phase, a span whose name is a key of ``PHASES``.
        attempt: the present attempt; the last one while the hosts end; None between attempts.
        restarts: how many restarts of ranks this start of the hosts, or this run, has used up.
        max_restarts: how many it may use up.
        hosts: the number of hosts of the last attempt.
        ranks: the number of ranks that were started last.
        spares: the names of the spare hosts that are ready.
        checkpoint_bytes: the memory that checkpoints take of a host, of that where they take most.
        persist_failure: that the last checkpoint was not copied to where its ranks have said, and why.
        failure: the last failure of ranks, or before a restart.
        hang: the hang that the ranks are in, or were in when they were stopped.
        slow: what slows the ranks.
        breakpoints: where ranks wait for a debugger, by rank.
        unshared: the first statement that forked ranks do not share, with the reason.
        logs: the folder with the logs of its hosts, unless it is in that of the job's logs.
    """

    name: str
    phase: Span
    attempt: Span | None = None
    restarts: int = 0
    max_restarts: int | None = None
    hosts: int | None = None
    ranks: int | None = None
    spares: Sequence[str] = ()
    checkpoint_bytes: int | None = None
    persist_failure: Moment | None = None
    failure: Moment | None = None
    hang: Moment | None = None
    slow: Slowness | None = None
    breakpoints: dict[int | None, Moment] = dataclasses.field(default_factory=dict)
    unshared: str = ""
    logs: str = ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The timeline of a job, which is the first span.

    Attributes:
        node_faults: what its machines have met, each with the name of the machine.
    """

    spans: tuple[Span, ...]
    moments: tuple[Moment, ...] = ()
    roles: tuple[RoleView, ...] = ()
    node_faults: tuple[tuple[str, NodeFault], ...] = ()

    @property
    def job(self) -> Span:
        """The whole job."""
        return self.spans[0]

    @property
    def hang(self) -> Moment | None:
        """The hang of the first role in which ranks hang, or hung when they were stopped; None if there is none."""
        return next((role.hang for role in self.roles if role.hang is not None), None)

    def spans_of(self, kind: str, role: str | None = None) -> list[Span]:
        """Return the spans of a kind; of all roles if ``role`` is None."""
        return [span for span in self.spans if span.kind == kind and role in (None, span.role)]

    def last_ranks(self) -> list[Span]:
        """Return the ranks of each role that were started last, or its commands, by role and rank."""
        ranks = self.spans_of("rank")
        attempts = {rank.role: rank.parent for rank in ranks}
        last = {(rank.role, rank.number): rank for rank in ranks if rank.parent is attempts[rank.role]}
        return [last[key] for key in sorted(last)]

    def attempt_folder(self, attempt: Span) -> str:
        """Return where each host has the files of an attempt, in the folder of its logs: ``run_2/attempt_0``."""
        around, number = attempt.parent, attempt.number - 1 if attempt.log_attempt is None else attempt.log_attempt
        return (f"run_{around.number}/" if around is not None and around.kind == "run" else "") + f"attempt_{number}"


def build(
    happened: Iterable[Event],
    roles: Sequence[RoleSpec],
    *,
    start: float = 0.0,
    started: float = 0.0,
    are_all: bool = True,
    end: float,
) -> Timeline:
    """Return the timeline of a job. Times are in seconds since the epoch, 0 if they are not known.

    Args:
        happened: its events.
        start: when it was submitted, unless the events have that.
        started: when its hosts were, unless the events have its submission.
        are_all: whether these are the events of all its hosts' starts, and not of the last alone.
        end: its end, or now.
    """
    ordered = sorted(happened, key=lambda event: event["time"])
    if started and not any(event["kind"] == "submitted" for event in ordered):
        # They are those of the present start of replica 0, whose clock may differ.
        first = min([started, *(event["time"] for event in ordered[:1])])
        kind = "job_started" if ordered and are_all else "unseen_start"
        ordered.insert(0, {"time": first, "kind": kind, "message": ""})
    if ordered and ordered[0]["kind"] == "submitted":
        start = ordered[0]["time"] - (ordered[0].get("seconds") or 0.0)
    start = start or (ordered[0]["time"] if ordered else end)
    if ordered and ordered[-1]["kind"] == "ended":
        end = ordered[-1]["time"]
    end = max(end, start, *(event["time"] for event in ordered if event["time"] < end + _RESOLUTION))
    ordered = [{**event, "time": min(max(event["time"], start), end)} for event in _as_they_happened(ordered)]
    spans, views = [Span("job", "job", start, end)], []
    first_phase = "submit" if ordered and ordered[0]["kind"] == "submitted" else "queued"
    for role in roles:
        reader = _RoleReader(spans, role, first_phase)
        for event in ordered:
            if event.get("role") in (None, role.name):
                reader.read(event)
        views.append(reader.end())
    for span in spans:
        if span.kind == "rank" and span.parent is not None:  # by now its attempt has its end
            span.start, span.end = _clamped(span.parent, span.start, span.end)
            if span.grouped is not None and not span.start <= span.grouped <= span.end:
                span.grouped = None
    moments = tuple(_moment(event, event["message"]) for event in ordered if event["kind"] in _MOMENTS)
    faulty = (event for event in ordered if event["kind"] == "node_fault" and event.get("fault") in get_args(NodeFault))
    faults = tuple((one_line(event.get("node", "")), event["fault"]) for event in faulty)
    return Timeline(tuple(spans), moments, tuple(views), faults)


def _moment(event: Event, text: str) -> Moment:
    return Moment(event["time"], event["kind"], one_line(text), event.get("role") or "")


def _cause(event: Event) -> Moment:
    """Return a moment with the event's reason, if it has one."""
    return _moment(event, event.get("reason") or event["message"])


def _as_they_happened(ordered: Sequence[Event]) -> Iterator[Event]:
    """Yield events, failures and hangs at the time when they began: they are written when they are noticed."""
    before = 0.0
    for event in ordered:
        began = event["time"]
        if event["kind"] == "failure":
            began = event.get("failed_at", began)
        elif event["kind"] == "hang":
            began -= event.get("waited", 0.0)
        elif event["kind"] != "attempt_end":
            before = event["time"]
        yield {**event, "time": min(event["time"], max(began, before))}


def _decoded(values: object, kind: type[T]) -> Iterator[T]:
    """Yield the values of an event that are of a kind; a rank may have written others."""
    for value in values if isinstance(values, list) else ():
        with contextlib.suppress(DecodeError):
            yield decode(kind, value)


class _RoleReader:
    """Read the events of one role, in the order of time, into spans and into a view."""

    def __init__(self, spans: list[Span], role: RoleSpec, phase: str) -> None:
        self._spans = spans
        self._job = spans[0]
        self._role = role
        begins = _BEGINS if role.runs_hosts else _BEGINS_ON_ALLOCATION if role.allocation else _BEGINS_WITHOUT_HOSTS
        self._phase_after = {kind: phase for phase, kinds in begins.items() for kind in kinds}
        self._top = self._add("role", role.name, self._job.start, self._job)
        first = self._span("phase", phase, self._job.start, self._top)
        self._view = RoleView(role.name, first, logs=role.allocation_logs)
        self._run: Span | None = None
        self._attempt: Span | None = None
        self._number = 0
        """The number of the last attempt of this start of the hosts, or of this run."""
        self._ranks: dict[int, Span] = {}
        """The ranks of the present attempt whose ends are not known."""
        self._imports: set[tuple[int, float]] = set()
        self._failed: list[Event] = []
        """What has failed since the last start."""

    def read(self, event: Event) -> None:
        """Read one event."""
        kind, time, view = event["kind"], event["time"], self._view
        if kind in _COUNTED_FROM:
            self._number = view.restarts = 0
        if kind == "run" and "run" in event:
            self._run = self._add("run", event["message"], time, self._top, event["run"])
        elif kind == "rank_restart":
            self._number = event.get("attempt", self._number)
            if "max_restarts" in event:  # a restart on a spare host, in the place of a lost one, uses up none
                view.restarts, view.max_restarts = view.restarts + 1, event["max_restarts"]
        self._change_phase(kind, time)
        if kind == "hang":
            with contextlib.suppress(ValueError):
                view.phase.awaited += parse_ranks(event.get("ranks", ""))
        if kind == "run_end" and self._run is not None and self._run.number == event.get("run"):
            self._run.end, self._run.code = time, event.get("code")
            self._run = None
        elif kind == "ranks" and self._attempt is not None:
            self._add_ranks(event, self._attempt)
        elif kind == "attempt_end":
            self._end_ranks(event)
            if (attempt := self._view.attempt) is not None:
                attempt.is_recorded = True
                attempt.steps = next(_decoded([event.get("steps")], StepsDone), None)
        self._read_view(event)
        self._read_failure(event)

    def end(self) -> RoleView:
        """Return what the role does after the last event."""
        self._close_phase(self._job.end)
        return self._view

    def _span(self, kind: str, name: str, start: float, parent: Span, number: int = 0) -> Span:
        """Return a span of the role that has not ended."""
        return Span(kind, name, start, self._job.end, parent, self._role.name, number)

    def _add(self, kind: str, name: str, start: float, parent: Span, number: int = 0) -> Span:
        self._spans.append(span := self._span(kind, name, start, parent, number))
        return span

    # -- phases and attempts -------------------------------------------------------------------------------------------

    def _change_phase(self, kind: str, time: float) -> None:
        present, following = self._view.phase, self._phase_after.get(kind)
        if kind == "hosts" and self._role.workload is WorkloadKind.ALLOCATION:
            following = "ready"
        elif kind == "replica_started" and present.name == "queued" and self._role.runs_hosts:
            following = "hosts"
        elif kind == "output" and present.name == "running":
            present.name = "first output"
        ignored = (
            (kind == "output" and present.name != "first output")
            or (kind == "unseen_start" and present.name != "queued")
            or (following == "stopping" and present.name in ("ready", "end"))
        )
        if following in (None, present.name) or ignored:
            return
        self._close_phase(time)
        if following == "ranks":
            self._number += 1
            name = f"attempt {self._number}"
            self._attempt = self._view.attempt = self._add("attempt", name, time, self._run or self._top, self._number)
        elif following not in _OF_ATTEMPT:
            self._attempt = None
            self._view.attempt = self._view.attempt if following == "end" else None
        self._view.phase = self._span("phase", following, time, self._attempt or self._top)

    def _close_phase(self, time: float) -> None:
        for span in (self._view.phase, self._attempt, *(self._ranks.values() if self._attempt is not None else ())):
            if span is not None:
                span.end = time
        if self._view.phase.seconds:
            self._spans.append(self._view.phase)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def _add_ranks(self, event: Event, attempt: Span) -> None:
        if "attempt" in event:
            self._number = attempt.number = event["attempt"] + 1
            attempt.name = f"attempt {attempt.number}"
        if isinstance(number := event.get("log_attempt"), int):
            attempt.log_attempt = number
        self._ranks, self._view.unshared = {}, event.get("unshared", "")
        for host in _decoded(event.get("hosts"), HostStart):
            if len(host.imported) == 2 and (imported := (host.replica, host.imported[0])) not in self._imports:
                self._imports.add(imported)
                span = self._add("import", "import of torch", 0.0, self._top, host.replica)
                span.replica, (span.start, span.end) = host.replica, _clamped(self._top, *host.imported)
            for rank, pid in enumerate(host.pids, host.first_rank):
                span = self._add("rank", f"rank {rank}", event["time"], attempt, rank)
                span.replica, span.node, span.pid, self._ranks[rank] = host.replica, one_line(host.node), pid, span

    def _end_ranks(self, event: Event) -> None:
        for rank_exit in _decoded(event.get("exits"), RankEnd):
            if rank_exit.started > 0 and (span := self._ranks.pop(rank_exit.rank, None)) is not None:
                span.start, span.end, span.grouped = rank_exit.started, rank_exit.ended, rank_exit.grouped
                span.code, span.secondary = rank_exit.code, rank_exit.secondary

    # -- the view ------------------------------------------------------------------------------------------------------

    def _read_view(self, event: Event) -> None:
        kind, view = event["kind"], self._view
        if kind == "hosts":
            view.hosts = event.get("count", view.hosts)
        elif kind == "ranks":
            view.ranks = event.get("count", view.ranks)
        elif kind == "spares":
            names = event.get("hosts")
            view.spares = [one_line(str(name)) for name in names] if isinstance(names, list) else []
        elif kind == "checkpoint_memory":
            size = event.get("bytes")
            view.checkpoint_bytes = size if isinstance(size, int) else None
        elif kind in ("persist_failed", "checkpoint", "run"):
            view.persist_failure = _cause(event) if kind == "persist_failed" else None
        elif kind == "breakpoint":
            view.breakpoints[event.get("rank")] = _cause(event)
        elif kind == "breakpoint_end":
            view.breakpoints.pop(event.get("rank"), None)
        if kind in ("ranks", "rank_restart", "run_end"):
            view.breakpoints.clear()
        if kind == "hang":
            view.hang = _cause(event)
        elif kind == "hang_end" or kind in _ENDS and not (kind == "result" and event.get("stopped")):
            view.hang = None

        if kind == "slow":
            view.slow = next(_decoded([event.get("slowness")], Slowness), None)
        elif kind == "slow_end" or kind in _ENDS:
            view.slow = None

    def _read_failure(self, event: Event) -> None:
        kind = event["kind"]
        if kind in _STARTS:
            self._failed = []
        elif kind in _RESTARTS:
            first = min(self._failed, key=lambda failure: _FAILURES.index(failure["kind"]), default=event)
            self._view.failure = _cause(event if "reason" in event else first)
        elif kind in _FAILURES and not event.get("stopped") and event.get("exit_code", event.get("code")) != 0:
            self._failed.append(event)
            if kind in ("failure", "preempted"):
                self._view.failure = _cause(event)


def _clamped(around: Span, start: float, end: float) -> tuple[float, float]:
    """Return times in their order, and within a span."""
    first, last = (min(max(time, around.start), around.end) for time in (start, end))
    return first, max(first, last)


def last_slow(happened: Iterable[Event]) -> str | None:
    """Return what the job has said last of what slows its ranks; None if that had ended, or never was."""
    told = [event for event in happened if event["kind"] in ("slow", "slow_end", "rank_restart")]
    return told[-1]["message"] if told and told[-1]["kind"] == "slow" else None


def count_rank_restarts(happened: Iterable[Event]) -> int:
    """Count how often ranks were restarted within one start of their hosts."""
    return sum(event["kind"] == "rank_restart" for event in happened)
