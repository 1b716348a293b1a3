# SPDX-License-Identifier: BSD-3-Clause
"""The timeline of a job: its events as spans of time, from the submission to the end.

The phases of a role follow each other without a gap, so their durations add up to that of the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from torchx_monarch.insight.events import PHASE_AFTER, Event
from torchx_monarch.model.codec import DecodeError, Seconds, decode

T = TypeVar("T")

PHASES = {
    "submit": "the job is submitted",
    "queue": "it waits for its scheduler",
    "hosts": "hosts start and find each other",
    "ranks": "ranks start, after the import of torch once for each host",
    "first output": "ranks run; none has printed anything",
    "running": "ranks run",
    "hang": "a rank makes the others wait in a collective",
    "stopping": "ranks are stopped",
    "idle": "the hosts wait for a run",
    "end": "the hosts end",
}
"""The phases of a role with their descriptions."""

_OF_ATTEMPT = frozenset({"ranks", "first output", "running", "hang", "stopping"})
"""The phases of an attempt; "ranks" is the first of them."""

_MOMENTS = frozenset(
    {"output", "failure", "preempted", "joined", "cancel", "stop", "hang", "result", "ended"}
    | {
        "rank_restart",
        "spare_used",
        "excluded",
        "replacement",
        "restart",
        "requeue",
        "resize",
        "replica_spared",
        "breakpoint",
    }
)
"""The kinds of events that are shown as moments."""

_RESOLUTION = 1.0
"""Seconds after its end in which a job may have had events: Kubernetes tells ends in whole seconds."""


@dataclasses.dataclass
class Span:
    """Something that took a while.

    Attributes:
        kind: ``job``, ``role``, ``run``, ``attempt``, ``phase``, ``import`` or ``rank``.
        name: its name for people: that of the phase, ``attempt 2``, ``rank 3``.
        end: its end; that of the timeline if it has not ended.
        parent: index of the span that contains it; None for the job.
        number: the number of the run, of the attempt (from 1), of the rank, or of the replica of an import; 0 for
            other kinds.
        replica: the replica whose host executes the rank; None for other kinds.
        code: exit code of the rank or the run, -n for death by signal n; None if there is none.
        secondary: whether the rank was stopped, or failed because it lost another rank.
        grouped: when the rank formed its first process group; None for other kinds, or if it is not known.
        log_attempt: N of the log folders ``attempt_N`` of an attempt; None for other kinds, or if it is not known.
    """

    kind: str
    name: str
    start: float
    end: float
    parent: int | None = None
    role: str = ""
    number: int = 0
    replica: int | None = None
    pid: int | None = None
    code: int | None = None
    secondary: bool = False
    grouped: float | None = None
    log_attempt: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Moment:
    """Something that happened, to a role or to the whole job: an event that is more than the end of a phase."""

    time: float
    kind: str
    text: str
    role: str = ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The timeline of a job: the first span is the job, and parents precede their children."""

    spans: tuple[Span, ...]
    moments: tuple[Moment, ...]

    @property
    def job(self) -> Span:
        """The whole job."""
        return self.spans[0]

    def spans_of(self, kind: str, role: str | None = None) -> list[Span]:
        """Return the spans of a kind; of all roles if ``role`` is None."""
        return [span for span in self.spans if span.kind == kind and role in (None, span.role)]

    def attempt_folder(self, attempt: Span) -> str:
        """Return where each host has the files of an attempt, in the folder of its logs: ``run_2/attempt_0``."""
        around = self.spans[attempt.parent or 0]
        number = attempt.number - 1 if attempt.log_attempt is None else attempt.log_attempt
        return (f"run_{around.number}/" if around.kind == "run" else "") + f"attempt_{number}"


def build(
    happened: Iterable[Event],
    roles: Sequence[str],
    *,
    start: float = 0.0,
    end: float,
    live: Collection[str] = (),
) -> Timeline:
    """Return the timeline of a job.

    Args:
        start: when it was submitted, in seconds since the epoch, unless the events have that; 0 if it is not known.
    """
    ordered = sorted(happened, key=lambda event: event["time"])
    if ordered and ordered[0]["kind"] == "submitted":
        start = ordered[0]["time"] - (ordered[0].get("seconds") or 0.0)
    start = start or (ordered[0]["time"] if ordered else end)
    if ordered and ordered[-1]["kind"] == "ended":
        end = ordered[-1]["time"]
    end = max(end, start, *(event["time"] for event in ordered if event["time"] < end + _RESOLUTION))
    ordered = [{**event, "time": min(max(event["time"], start), end)} for event in _as_they_happened(ordered)]
    spans = [Span("job", "job", start, end)]
    for role in roles:
        of_role = [event for event in ordered if event.get("role") in (None, role)]
        _add_role(spans, of_role, role, role in live)
    moments = tuple(
        Moment(event["time"], event["kind"], event["message"], event.get("role") or "")
        for event in ordered
        if event["kind"] in _MOMENTS
    )
    return Timeline(tuple(spans), moments)


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


def _add_role(spans: list[Span], happened: Sequence[Event], role: str, live: bool) -> None:
    job = spans[0]
    top = len(spans)
    parent = top
    spans.append(Span("role", role, job.start, job.end, 0, role))
    runs = _runs(happened, role, job.end, top)
    spans += runs
    attempt: Span | None = None
    for name, start, end in _phases(happened, job, live):
        if start == end and name != "ranks":
            continue
        if name == "ranks":
            around = next((top + 1 + at for at, run in enumerate(runs) if run.start <= start < run.end), top)
            number = _attempt_number(happened, spans, around, role, start, end)
            attempt, parent = Span("attempt", f"attempt {number}", start, end, around, role, number), len(spans)
            spans.append(attempt)
        elif name not in _OF_ATTEMPT:
            attempt, parent = None, top
        if attempt is not None:
            attempt.end = end
        if start < end:
            spans.append(Span("phase", name, start, end, parent, role))
    _add_hosts(spans, happened, role, top)


def _phases(happened: Sequence[Event], job: Span, live: bool) -> list[tuple[str, float, float]]:
    """Return the phases of a role without gaps: name, start, end."""
    found: list[tuple[str, float, float]] = []
    name, since = "submit", job.start
    if not happened or happened[0]["kind"] != "submitted":
        name = "queue"
    for event in happened:
        kind, time = event["kind"], event["time"]
        following = PHASE_AFTER.get(kind)
        if kind == "replica_started" and name == "queue":
            following = "hosts"
        if following is None or (following == "stopping" and name in ("idle", "end")):
            continue
        if kind == "hosts" and live:
            following = "idle"
        elif kind == "output":
            if name != "running":
                continue
            name = "first output"
        if following != name:
            found.append((name, since, time))
            name, since = following, time
    found.append((name, since, job.end))
    return found


def _runs(happened: Sequence[Event], role: str, end: float, parent: int) -> list[Span]:
    found: list[Span] = []
    for event in happened:
        number = event.get("run")
        if event["kind"] == "run" and number is not None:
            found.append(Span("run", event["message"], event["time"], end, parent, role, number))
        elif event["kind"] == "run_end" and found and found[-1].number == number:
            found[-1].end, found[-1].code = event["time"], event.get("code")
    return found


def _attempt_number(
    happened: Sequence[Event], spans: Sequence[Span], around: int, role: str, start: float, end: float
) -> int:
    """Return the number of the attempt whose ranks start, from 1, as the hosts count or by counting."""
    for event in happened:
        if event["kind"] == "ranks" and start <= event["time"] <= end and "attempt" in event:
            return int(event["attempt"]) + 1
    return 1 + sum(span.kind == "attempt" and span.role == role and span.parent == around for span in spans)


@dataclasses.dataclass(frozen=True)
class _Host:
    """A host in an event ``ranks``: its ranks, and when it imported torch."""

    replica: int
    first_rank: int = 0
    pids: tuple[int | None, ...] = ()
    imported: tuple[Seconds, ...] = ()
    unshared: str = ""


@dataclasses.dataclass(frozen=True)
class _Exit:
    """A rank in an event ``attempt_end``."""

    rank: int
    code: int | None
    started: Seconds
    ended: Seconds
    secondary: bool = False
    grouped: Seconds | None = None


def seconds_to_group(happened: Iterable[Event]) -> tuple[float, str]:
    """Return how long the fastest rank of the last attempt took to its first process group, 0 if that is not known, and
    the first import that its ranks did not share, with the reason."""
    last = {event["kind"]: event for event in happened}
    hosts = _decoded(last.get("ranks", {}).get("hosts"), _Host)
    exits = _decoded(last.get("attempt_end", {}).get("exits"), _Exit)
    seconds = min((end.grouped - end.started for end in exits if end.grouped is not None), default=0.0)
    return seconds, next((host.unshared for host in hosts if host.unshared), "")


def _decoded(values: object, kind: type[T]) -> Iterator[T]:
    """Yield the values of an event that are of a kind; a rank may have written others."""
    for value in values if isinstance(values, list) else ():
        with contextlib.suppress(DecodeError):
            yield decode(kind, value)


def _add_hosts(spans: list[Span], happened: Sequence[Event], role: str, top: int) -> None:
    attempts = [at for at, span in enumerate(spans) if span.kind == "attempt" and span.role == role]
    imports: set[tuple[int, float]] = set()
    ranks: dict[int, Span] = {}
    for event in happened:
        around = next((at for at in reversed(attempts) if spans[at].start <= event["time"]), None)
        if around is None:
            continue
        attempt = spans[around]
        if event["kind"] == "ranks":
            if isinstance(number := event.get("log_attempt"), int):
                attempt.log_attempt = number
            ranks = {}
            for host in _decoded(event.get("hosts"), _Host):
                if len(host.imported) == 2 and (imported := (host.replica, host.imported[0])) not in imports:
                    imports.add(imported)
                    start, end = _clamped(spans[top], *host.imported)
                    spans.append(Span("import", "import of torch", start, end, top, role, host.replica, host.replica))
                start, end = min(event["time"], attempt.end), attempt.end
                for rank, pid in enumerate(host.pids, host.first_rank):
                    ranks[rank] = Span("rank", f"rank {rank}", start, end, around, role, rank, host.replica, pid)
            spans += ranks.values()
        elif event["kind"] == "attempt_end":
            for rank_exit in _decoded(event.get("exits"), _Exit):
                span = ranks.get(rank_exit.rank)
                if span is not None and rank_exit.started > 0:
                    span.start, span.end = _clamped(attempt, rank_exit.started, rank_exit.ended)
                    span.code, span.secondary = rank_exit.code, rank_exit.secondary
                    if rank_exit.grouped is not None and span.start <= rank_exit.grouped <= span.end:
                        span.grouped = rank_exit.grouped


def _clamped(around: Span, start: float, end: float) -> tuple[float, float]:
    """Return times in their order, and within a span."""
    first, last = (min(max(time, around.start), around.end) for time in (start, end))
    return first, max(first, last)


def lost_seconds(timeline: Timeline, role: str) -> dict[str, float]:
    """Return the seconds in which the ranks of a role did not run, or hung, by cause.

    ``queue``: before the hosts started. ``launch``: from there until the first ranks ran. ``restart``: from each
    failure until the ranks ran again, or the job ended. ``hang``: while ranks waited for one of them.
    """
    lost = {"queue": 0.0, "launch": 0.0, "restart": 0.0, "hang": 0.0}
    cause = "launch"
    for span in timeline.spans_of("phase", role):
        if span.name in ("running", "first output"):
            cause = "restart"
        elif span.name in ("idle", "end"):
            cause = "launch"
        elif span.name == "hang":
            lost["hang"] += span.seconds
        elif span.name in ("submit", "queue") and cause == "launch":
            lost["queue"] += span.seconds
        else:
            lost[cause] += span.seconds
    return lost
