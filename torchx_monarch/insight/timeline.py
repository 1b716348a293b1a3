# SPDX-License-Identifier: BSD-3-Clause
"""The timeline of a job: its events as spans of time, from the submission to the end.

The phases of a role follow each other without a gap, so their durations add up to that of the job. A rank may write
events of any content, where it runs as the user that the events file belongs to: fields of a wrong type are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchx_monarch.insight.events import Event

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

_PHASE_AFTER = {
    "submitted": "queue",
    "supervised": "hosts",
    "job_started": "hosts",
    "hosts": "ranks",
    "run": "ranks",
    "ranks": "running",
    "output": "running",
    "hang": "hang",
    "hang_end": "running",
    "failure": "stopping",
    "preempted": "stopping",
    "joined": "stopping",
    "cancel": "stopping",
    "stop": "stopping",
    "rank_restart": "ranks",
    "replacement": "hosts",
    "restart": "hosts",
    "requeue": "queue",
    "run_end": "idle",
    "result": "end",
}
"""The phase that begins with an event, by the event's kind."""

_OF_ATTEMPT = frozenset({"ranks", "first output", "running", "hang", "stopping"})
"""The phases of an attempt; "ranks" is the first of them."""

_MOMENTS = frozenset(
    {
        *("output", "failure", "preempted", "joined", "cancel", "stop", "hang", "result", "ended"),
        *(
            "rank_restart",
            "spare_used",
            "excluded",
            "replacement",
            "restart",
            "requeue",
            "resize",
            "keeper_lost",
            "replica_spared",
        ),
    }
)
"""The kinds of events that are shown as moments."""

_RESOLUTION = 1.0
"""Seconds after its end in which a job may have had events: Kubernetes tells ends in whole seconds."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took a while.

    Attributes:
        kind: ``job``, ``role``, ``run``, ``attempt``, ``phase``, ``import`` or ``rank``.
        name: its name for people: that of the phase, ``attempt 2``, ``rank 3``.
        start: in seconds since the epoch.
        end: its end; that of the timeline if it has not ended.
        parent: index of the span that contains it; None for the job.
        role: name of the role; empty for the job.
        number: the number of the run, of the attempt (from 1), of the rank, or of the replica of an import; 0 for
            other kinds.
        replica: the replica whose host executes the rank; None for other kinds.
        pid: process id of the rank on its host; None for other kinds, or if it is not known.
        code: exit code of the rank or the run, -n for death by signal n; None if there is none.
        secondary: whether the rank was stopped, or failed because it lost another rank.
        grouped: when the rank formed its first process group; None for other kinds, or if it is not known.
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

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Moment:
    """Something that happened: an event that is more than the end of a phase.

    Attributes:
        time: when, in seconds since the epoch.
        kind: the event's kind.
        text: the event's message.
        role: name of the role; empty for the whole job.
    """

    time: float
    kind: str
    text: str
    role: str = ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The timeline of a job.

    Attributes:
        spans: its spans; the first is the job, and parents precede their children.
        moments: what happened, in the order of time.
    """

    spans: tuple[Span, ...]
    moments: tuple[Moment, ...]

    @property
    def job(self) -> Span:
        """The whole job."""
        return self.spans[0]

    def of_kind(self, kind: str, role: str | None = None) -> list[Span]:
        """Return the spans of a kind; of all roles if ``role`` is None."""
        return [span for span in self.spans if span.kind == kind and role in (None, span.role)]


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
        Moment(event["time"], event["kind"], event["message"], _text(event.get("role")))
        for event in ordered
        if event["kind"] in _MOMENTS
    )
    return Timeline(tuple(spans), moments)


def _as_they_happened(ordered: Sequence[Event]) -> Iterator[Event]:
    """Yield events. Failures and hangs have the time when they began: they are noted later, after ``failed_at`` or
    ``waited`` seconds after the beginning."""
    before = 0.0
    for event in ordered:
        began = event["time"]
        if event["kind"] == "failure":
            began = event.get("failed_at")
        elif event["kind"] == "hang" and isinstance(event.get("waited"), (int, float)):
            began -= event["waited"]
        elif event["kind"] != "attempt_end":
            before = event["time"]
        if isinstance(began, (int, float)) and began < event["time"]:
            event = {**event, "time": max(float(began), before)}
        yield event


def _add_role(spans: list[Span], happened: Sequence[Event], role: str, live: bool) -> None:
    """Add the spans of a role: its phases in their attempts, and those in their runs."""
    job = spans[0]
    top = len(spans)
    spans.append(Span("role", role, job.start, job.end, 0, role))
    runs = _runs(happened, role, job.end)
    for span in runs:
        spans.append(dataclasses.replace(span, parent=top))
    phases = _phases(happened, job, live)
    attempt: int | None = None
    for name, start, end in phases:
        if start == end and name != "ranks":
            continue
        if name == "ranks":
            around = next((top + 1 + at for at, run in enumerate(runs) if run.start <= start < run.end), top)
            number = _attempt_number(happened, spans, around, role, start, end)
            attempt = len(spans)
            spans.append(Span("attempt", f"attempt {number}", start, end, around, role, number))
        elif name not in _OF_ATTEMPT:
            attempt = None
        if attempt is not None:
            spans[attempt] = dataclasses.replace(spans[attempt], end=end)
        if start < end:
            spans.append(Span("phase", name, start, end, top if attempt is None else attempt, role))
    _add_hosts(spans, happened, role, top)


def _phases(happened: Sequence[Event], job: Span, live: bool) -> list[tuple[str, float, float]]:
    """Return the phases of a role without gaps: name, start, end."""
    found: list[tuple[str, float, float]] = []
    name, since = "submit", job.start
    if not happened or happened[0]["kind"] != "submitted":
        name = "queue"
    for event in happened:
        kind, time = event["kind"], event["time"]
        following = _PHASE_AFTER.get(kind)
        if kind == "replica_started" and name == "queue":
            following = "hosts"
        if following is None or (following == "stopping" and name in ("idle", "end")):
            continue
        if kind == "hosts" and live:
            following = "idle"
        elif kind == "run" and name == "ranks":
            name = "idle"  # a live allocation whose kind the caller did not know
        elif kind == "output":
            if name != "running":
                continue
            name = "first output"
        if following != name:
            found.append((name, since, time))
            name, since = following, time
    found.append((name, since, job.end))
    return found


def _runs(happened: Sequence[Event], role: str, end: float) -> list[Span]:
    """Return the runs of a live allocation."""
    found: list[Span] = []
    for event in happened:
        number = _number(event.get("run"))
        if event["kind"] == "run" and number is not None:
            found.append(Span("run", event["message"], event["time"], end, role=role, number=number))
        elif event["kind"] == "run_end" and found and found[-1].number == number:
            found[-1] = dataclasses.replace(found[-1], end=event["time"], code=_number(event.get("code")))
    return found


def _attempt_number(
    happened: Sequence[Event], spans: Sequence[Span], around: int, role: str, start: float, end: float
) -> int:
    """Return the number of the attempt whose ranks start, from 1, as the hosts count or by counting."""
    for event in happened:
        if event["kind"] == "ranks" and start <= event["time"] <= end:
            number = _number(event.get("attempt"))
            if number is not None:
                return number + 1
    return 1 + sum(span.kind == "attempt" and span.role == role and span.parent == around for span in spans)


def _add_hosts(spans: list[Span], happened: Sequence[Event], role: str, top: int) -> None:
    """Add the imports of hosts and the ranks of each attempt."""
    attempts = [at for at, span in enumerate(spans) if span.kind == "attempt" and span.role == role]
    imports: set[tuple[int, float]] = set()
    latest: dict[int, int] = {}
    for event in happened:
        around = next((at for at in reversed(attempts) if spans[at].start <= event["time"]), None)
        if around is None:
            continue
        if event["kind"] == "ranks":
            latest = {}
            for host in _list(event.get("hosts")):
                if not isinstance(host, Mapping) or (replica := _number(host.get("replica"))) is None:
                    continue
                times = _times(host.get("imported"))
                if times is not None and (replica, times[0]) not in imports:
                    imports.add((replica, times[0]))
                    start, end = (_within(spans[top], time) for time in times)
                    spans.append(Span("import", "import of torch", start, end, top, role, replica, replica))
                first = _number(host.get("first_rank")) or 0
                for local, pid in enumerate(_list(host.get("pids"))):
                    number, end = first + local, spans[around].end
                    start = min(event["time"], end)
                    latest[number] = len(spans)
                    name = f"rank {number}"
                    spans.append(Span("rank", name, start, end, around, role, number, replica, _number(pid)))
        elif event["kind"] == "attempt_end":
            for rank_exit in _list(event.get("exits")):
                if not isinstance(rank_exit, Mapping):
                    continue
                rank, code = _number(rank_exit.get("rank")), _number(rank_exit.get("code"))
                times = _times((rank_exit.get("started"), rank_exit.get("ended")))
                if rank is not None and rank in latest and times is not None:
                    start, end = (_within(spans[around], time) for time in times)
                    secondary, formed = rank_exit.get("secondary") is True, rank_exit.get("grouped")
                    grouped = float(formed) if isinstance(formed, (int, float)) and start <= formed <= end else None
                    spans[latest[rank]] = dataclasses.replace(
                        spans[latest[rank]], start=start, end=end, code=code, secondary=secondary, grouped=grouped
                    )


def lost_seconds(timeline: Timeline, role: str) -> dict[str, float]:
    """Return the seconds in which the ranks of a role did not run, or hung, by cause.

    ``queue``: before the hosts started. ``launch``: from there until the first ranks ran. ``restart``: from each
    failure until the ranks ran again, or the job ended. ``hang``: while ranks waited for one of them.
    """
    lost = {"queue": 0.0, "launch": 0.0, "restart": 0.0, "hang": 0.0}
    cause = "launch"
    for span in timeline.of_kind("phase", role):
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


def _within(span: Span, time: float) -> float:
    return min(max(time, span.start), span.end)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 40 else None


def _times(value: object) -> tuple[float, float] | None:
    """Return a pair of times in their order; None if a value is something else."""
    found = [time for time in _list(value) if isinstance(time, (int, float)) and 0 < time < 1e11]
    return (found[0], max(found)) if len(found) == 2 else None


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
