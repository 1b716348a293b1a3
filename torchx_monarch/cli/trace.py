# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch trace``: write the timeline of a job as Chrome trace events, which Perfetto opens.

The job is one process of the trace, with a track for each role; each host is another, with a track for its import of
torch and one for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.output import STDOUT, add_json, add_output, print_json, write_output
from torchx_monarch.insight.timeline import Span, Timeline

_JOB = 1
"""Process id of the job in the trace; those of the hosts follow."""

_FAILURES = frozenset({"failure", "preempted", "hang", "cancel"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    add_output(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Write the trace."""
    with opened_job(args.handle) as job:
        facts = job.read(whole_log=True)
    written = trace(facts.timeline, facts.status.name, from_log=facts.status.from_log)
    write_output(args.output, json.dumps(written))
    if args.json and args.output not in STDOUT:
        print_json({"path": os.path.abspath(args.output), "events": len(written["traceEvents"])})


# -- the trace ---------------------------------------------------------------------------------------------------------


class _Tracks:
    """The places of spans in a trace: processes with threads, and the events that name them."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._roles = [span.name for span in timeline.spans_of("role")]
        hosts = sorted({(span.role, span.replica) for span in timeline.spans if span.replica is not None})
        self._processes = {host: process for process, host in enumerate(hosts, _JOB + 1)}
        self.names = _named("process", _JOB, 0, f"job {name}")
        for at, role in enumerate(self._roles):
            self.names += _named("thread", _JOB, at, f"role {role}")
        for (role, replica), process in self._processes.items():
            self.names += _named("process", process, 0, f"host {role}/{replica}")
            self.names += _named("thread", process, 0, "import")
        for span in {(span.role, span.number): span for span in timeline.spans_of("rank")}.values():
            self.names += _named("thread", *self.of_span(span), span.name)

    def of_span(self, span: Span) -> tuple[int, int]:
        """Return the process and the thread of a span."""
        if span.replica is None:
            return self.of_role(span.role)
        return self._processes[span.role, span.replica], span.number + 1 if span.kind == "rank" else 0

    def of_role(self, role: str) -> tuple[int, int]:
        """Return the process and the thread of a role; those of the first role for the whole job."""
        return _JOB, self._roles.index(role) if role in self._roles else 0


def trace(timeline: Timeline, name: str, from_log: bool = False) -> dict[str, Any]:
    """Return the JSON object of a trace file.

    Args:
        from_log: whether the timeline is of the progress lines in the log, which ranks can imitate.
    """
    start, tracks = timeline.job.start, _Tracks(timeline, name)
    events = tracks.names
    for span in timeline.spans[1:]:  # the roles of the job last as long as it does
        track = tracks.of_span(span)
        events.append(_complete(span, start, track))
        if span.grouped is not None:
            events.append(_instant("process group formed", "moment", "t", span.grouped - start, track))
    for moment in timeline.moments:
        category = "failure" if moment.kind in _FAILURES else "moment"
        event = _instant(moment.kind, category, "p", moment.time - start, tracks.of_role(moment.role))
        events.append({**event, "args": {"message": moment.text}})
    about = {"start": start, "job": name, "from_log": from_log}
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


def _instant(name: str, category: str, scope: str, seconds: float, track: tuple[int, int]) -> dict[str, Any]:
    place = {"pid": track[0], "tid": track[1]}
    return {"name": name, "cat": category, "ph": "i", "s": scope, "ts": _micros(seconds, 0.0), **place}


def _micros(time: float, start: float) -> int:
    """Return microseconds since the start of the job: whole, so that children end where their parents do."""
    return round((time - start) * 1e6)
