# SPDX-License-Identifier: BSD-3-Clause
"""Write a timeline as Chrome trace events, which Perfetto and ``chrome://tracing`` open.

The job is one process of the trace, with a track for each role; each host is another, with a track for its import of
torch and one for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchx_monarch.insight.recorder_dump import RecordedCollective
from torchx_monarch.insight.timeline import Span, Timeline

_JOB = 1
"""Process id of the job in the trace; those of the hosts follow."""

_FAILURES = frozenset({"failure", "preempted", "hang", "cancel"})


def trace(
    timeline: Timeline,
    name: str,
    collectives: Mapping[tuple[int, int, int], Iterable[RecordedCollective]] | None = None,
    from_log: bool = False,
) -> dict[str, Any]:
    """Return the JSON object of a trace file.

    Args:
        collectives: what the flight recorder has of the ranks, by run (0 for a batch job), attempt (from 1) and rank;
            None to leave it out.
        from_log: whether the timeline is of the progress lines in the log, which ranks can imitate.
    """
    job = timeline.job
    roles = [span.name for span in timeline.of_kind("role")]
    hosts = sorted({(span.role, span.replica or 0) for span in timeline.spans if span.replica is not None})
    processes = {host: _JOB + 1 + at for at, host in enumerate(hosts)}
    events = [*_named("process", _JOB, 0, f"job {name}")]
    events += [event for at, role in enumerate(roles) for event in _named("thread", _JOB, at, f"role {role}")]
    for (role, replica), process in processes.items():
        events += _named("process", process, 0, f"host {role}/{replica}")
        events += _named("thread", process, 0, "import")
    ranks = {(span.role, span.number): span for span in timeline.of_kind("rank")}
    for span in ranks.values():
        events += _named("thread", processes[span.role, span.replica or 0], span.number + 1, span.name)
    for span in timeline.spans:
        if span.replica is not None:
            track = (processes[span.role, span.replica], span.number + 1 if span.kind == "rank" else 0)
        elif span.kind == "job":
            continue  # its roles last as long
        else:
            track = (_JOB, roles.index(span.role))
        events.append(_complete(span, job.start, track))
        if span.grouped is not None:
            events.append(_instant("process group formed", span.grouped - job.start, track))
    for moment in timeline.moments:
        events.append(
            {
                "name": moment.kind,
                "cat": "failure" if moment.kind in _FAILURES else "moment",
                "ph": "i",
                "s": "p",
                "ts": _micros(moment.time, job.start),
                "pid": _JOB,
                "tid": roles.index(moment.role) if moment.role in roles else 0,
                "args": {"message": moment.text},
            }
        )
    for span in timeline.of_kind("rank") if collectives else ():
        attempt = timeline.spans[span.parent or 0]
        around = timeline.spans[attempt.parent or 0]
        run = around.number if around.kind == "run" else 0
        for collective in (collectives or {}).get((run, attempt.number, span.number), ()):
            if span.start <= collective.called <= span.end:
                track = (processes[span.role, span.replica or 0], span.number + 1)
                events.append(_collective(collective, span, job.start, track))
    about = {"start": job.start, "job": name, "from_log": from_log}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(what: str, process: int, thread: int, name: str) -> list[dict[str, Any]]:
    """Return the events that name a process or a thread, and place it in the order of its number."""
    place = {"ph": "M", "pid": process, "tid": thread, "ts": 0}
    order = process if what == "process" else thread
    return [
        {"name": f"{what}_name", **place, "args": {"name": name}},
        {"name": f"{what}_sort_index", **place, "args": {"sort_index": order}},
    ]


def _complete(span: Span, start: float, track: tuple[int, int]) -> dict[str, Any]:
    begun = _micros(span.start, start)
    facts = {
        "number": span.number or None,
        "replica": span.replica,
        "pid": span.pid,
        "exit_code": span.code,
        "secondary": span.secondary or None,
    }
    return {
        "name": span.name,
        "cat": span.kind,
        "ph": "X",
        "ts": begun,
        "dur": _micros(span.end, start) - begun,
        "pid": track[0],
        "tid": track[1],
        "args": {name: value for name, value in facts.items() if value is not None},
    }


def _instant(name: str, seconds: float, track: tuple[int, int]) -> dict[str, Any]:
    place = {"pid": track[0], "tid": track[1]}
    return {"name": name, "cat": "moment", "ph": "i", "s": "t", "ts": _micros(seconds, 0.0), **place}


def _collective(collective: RecordedCollective, rank: Span, start: float, track: tuple[int, int]) -> dict[str, Any]:
    """Return a span for a collective whose end is known, or that never ended; else the moment of its call."""
    begun = _micros(collective.called, start)
    event = {
        "name": collective.name,
        "cat": "collective",
        "ph": "i",
        "s": "t",
        "ts": begun,
        "pid": track[0],
        "tid": track[1],
        "args": {
            "group": collective.group,
            "number": collective.number,
            "sizes": collective.sizes,
            "completed": collective.has_completed,
        },
    }
    end = collective.completed if collective.completed is not None else None if collective.has_completed else rank.end
    if end is not None:
        del event["s"]
        event.update(ph="X", dur=max(0, _micros(min(end, rank.end), start) - begun))
    return event


def _micros(time: float, start: float) -> int:
    """Return microseconds since the start of the job: whole, so that children end where their parents do."""
    return round((time - start) * 1e6)
