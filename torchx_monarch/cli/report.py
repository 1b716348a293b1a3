# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch report``: write a page about a job: what ran, why it ended, and where its time went."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Sequence

from torchx_monarch.cli.arguments import add_address, add_handle
from torchx_monarch.cli.jobs import SAMPLE_PAUSE_S, JobFacts, opened_job
from torchx_monarch.cli.output import STDOUT, print_json, write_output
from torchx_monarch.cli.status import facts, show_when, state_and_time
from torchx_monarch.insight.account import lost_seconds
from torchx_monarch.insight.report_page import Curve, LateRow, curves, late_rows, legend, render, rows_of, shares, ticks
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.insight.timeline import PHASES, Timeline
from torchx_monarch.schedulers.job_metrics import AttemptMetrics, host_logs, read_activity
from torchx_monarch.schedulers.job_status import JobStatus
from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line, printable

_MAX_RANKS = 512

_MAX_PLACES = 4
"""Roles, or runs of an allocation, whose curves are shown."""

_MAX_BYTES = 256 * 1024
"""Most bytes of the stacks of one host that are shown."""

_SHOWN_ELSEWHERE = ("message", "cause", "log", "phase", "hang", "runs", "idle", "next", "trend")
"""The facts of a status that the page has in other places."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write; - for stdout")
    add_address(parser)


def run(args: argparse.Namespace) -> None:
    with opened_job(args.handle, address=args.address) as job:
        facts = job.say_problem(job.read(SAMPLE_PAUSE_S))
    write_output(args.output, page_of(facts))
    if args.json and args.output not in STDOUT:
        roles = [span.name for span in facts.timeline.spans_of("role")]
        print_json(
            {
                "path": os.path.abspath(args.output),
                "state": facts.status.state,
                "seconds": facts.timeline.job.seconds,
                "roles": {role: _times(facts.timeline, role) for role in roles},
                "account": facts.status.to_json()["account"],
            }
        )


def _times(timeline: Timeline, role: str) -> dict[str, dict[str, float]]:
    phases = {share.phase: share.seconds for share in shares(timeline, role)}
    return {"phases": phases, "lost": lost_seconds(timeline, role)}


def page_of(job: JobFacts, live: str = "") -> str:
    """Return the page about a job; ``live`` is the query of its pages where a server shows them."""
    status, timeline = job.status, job.timeline
    cause = status.cause or status.message or PHASES.get(status.phase or "", "")
    hang = f"hang: {status.hang.message}" if status.hang is not None else ""
    ranks, unshown = timeline.last_ranks(), ("output", "result", "ended")
    page = {
        "name": one_line(status.name),
        "handle": one_line(status.handle),
        "state": status.state,
        "headline": state_and_time(status),
        "cause": "; ".join(filter(None, (one_line(cause), hang))),
        "traceback": printable(status.traceback),
        "log": one_line(status.log or "") if status.log != status.log_folder else "",
        "facts": _facts(status),
        "rows": (rows := rows_of(timeline)),
        "legend": legend(rows),
        "ticks": ticks(timeline.job.seconds),
        "roles": [
            {"name": span.name, "lost": _lost(timeline, span.name), "shares": shares(timeline, span.name)}
            for span in timeline.spans_of("role")
        ],
        "curves": _curves(job.metrics, timeline),
        "activity": _activity(job),
        "runs": timeline.spans_of("run")[-200:],
        "moments": [moment for moment in timeline.moments if moment.kind not in unshown][-500:],
        "ranks": ranks[:_MAX_RANKS],
        "ranks_left_out": max(0, len(ranks) - _MAX_RANKS),
        "stacks": read_stacks(status.log_folder, timeline),
        "written": show_when(time.time(), None),
        "live": live,
    }
    return render(page, timeline.job)


def _curves(attempts: Sequence[AttemptMetrics], timeline: Timeline) -> list[tuple[str, list[Curve]]]:
    """Return the curves of each role, of an allocation of each of its last runs, with their titles.

    Each metric has two, over the steps and over the time of the job.
    """
    places: dict[tuple[str, int], list[AttemptMetrics]] = {}
    for attempt in attempts:
        places.setdefault((attempt.role, attempt.run), []).append(attempt)
    several = len({role for role, _ in places}) > 1
    found = []
    for (role, run), own in [*places.items()][-_MAX_PLACES:]:
        where = [f"in run {run}"] if run else []
        where += [f"of {one_line(role)}"] if several else []
        title = " ".join([f"What rank {own[-1].rank} reported", *where])
        moments = [moment for moment in timeline.moments if moment.role in ("", role)]
        points = [attempt.points for attempt in own]
        pairs = zip(*(curves(points, over=over, moments=moments) for over in (None, timeline.job)), strict=True)
        if shown := [*itertools.chain.from_iterable(pairs)]:
            found.append((title, shown))
    return found


def _activity(job: JobFacts) -> list[tuple[str, list[Curve], list[LateRow]]]:
    """Return the curves of what the ranks of each role did, and how late they were."""
    of_roles: dict[str, list[AttemptMetrics]] = {}
    for attempt in read_activity(job.status.log_folder, job.timeline):
        of_roles.setdefault(attempt.role, []).append(attempt)
    found = []
    for role, attempts in of_roles.items():
        points = [attempt.points for attempt in attempts]
        title = "What the ranks did" + (f" ({one_line(role)})" if len(of_roles) > 1 else "")
        moments = [moment for moment in job.timeline.moments if moment.role in ("", role)]
        drawn = curves(points, over=job.timeline.job, moments=moments)
        found.append((title, drawn, late_rows(points, job.timeline, role)))
    return found


def _facts(status: JobStatus) -> list[tuple[str, str]]:
    stated = [
        (title.rstrip(": "), text) for title, text in facts(status, on_page=True) if title not in _SHOWN_ELSEWHERE
    ]
    dates = (("submitted", status.submitted), ("started", status.started), ("ended", status.ended))
    found = [fact for fact in stated if fact[0].startswith("command")]
    found += [(title, show_when(when, None)) for title, when in dates if when is not None]
    return found + [fact for fact in stated if not fact[0].startswith("command")]


def _lost(timeline: Timeline, role: str) -> str:
    lost = {cause: seconds for cause, seconds in lost_seconds(timeline, role).items() if seconds >= 0.05}
    total = sum(lost.values())
    if unknown := sum(span.seconds for span in timeline.spans_of("phase", role) if span.name == "unknown"):
        return f"What happened during {show_duration(unknown)} is not known: this machine does not see those events."
    if not total:
        return "No time was lost."
    # The time after a failure is lost also if nothing starts again, and the job ends.
    named = {"restart": "after failures"}
    parts = ", ".join(f"{named.get(cause, cause)} {show_duration(seconds)}" for cause, seconds in lost.items())
    return f"Lost: {show_duration(total)} of {show_duration(timeline.job.seconds)} ({parts})."


def read_stacks(folder: str | None, timeline: Timeline) -> list[tuple[str, str]]:
    """Return the files of stacks that hosts took before they stopped ranks, of the last attempt with some."""
    for attempt in reversed(timeline.spans_of("attempt") if folder else []):
        found = []
        logs = host_logs(folder or "", timeline, attempt)
        for path in sorted(logs.glob(f"*/{timeline.attempt_folder(attempt)}/stacks.txt")):
            with contextlib.suppress(OSError), open(safe_files.open_file(path), "rb") as file:
                text = file.read(_MAX_BYTES).decode(errors="replace")
                found.append((one_line(str(path.relative_to(logs.parent))), printable(text)))
        if found:
            return found
    return []
