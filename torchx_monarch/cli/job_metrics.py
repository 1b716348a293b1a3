# SPDX-License-Identifier: BSD-3-Clause
"""The metrics of a job for Prometheus, of its status and its timeline."""

from __future__ import annotations

from collections import Counter, defaultdict

from torchx_monarch.insight.prometheus_text import Family
from torchx_monarch.insight.timeline import Timeline
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.job_status import JobStatus

PREFIX = "torchx_monarch_"
"""What the names of all metrics begin with."""


def of_job(status: JobStatus, timeline: Timeline, job: str) -> list[Family]:
    """Return the metrics of a job as a whole, and of its roles' attempts and phases.

    Args:
        job: the label ``job``: the app's id.
    """
    label = {"job": job}
    state = Family(f"{PREFIX}job_state", "1 for the state of the job, 0 for all others")
    for job_state in State:
        state.add({**label, "state": job_state.value}, int(job_state.value == status.state))
    found = [state]
    for name, text, value in (
        ("job_submitted_timestamp_seconds", "when the job was submitted", status.submitted),
        ("job_started_timestamp_seconds", "when the job began to run", status.started),
        ("job_ended_timestamp_seconds", "when the job ended", status.ended),
        ("job_elapsed_seconds", "seconds that the job has run, or has waited to run", status.elapsed),
        ("job_exit_code", "exit code of the job that has ended", status.exit_code),
        ("job_hosts", "number of hosts of the job", status.hosts),
        ("job_ranks", "number of ranks that were started last", status.ranks),
        ("job_restarts_total", "restarts of the app, of a replica or of ranks", status.restarts),
    ):
        family = Family(PREFIX + name, text)
        family.add(label, value)
        found.append(family)
    return [*found, *_of_timeline(timeline, label)]


def _of_timeline(timeline: Timeline, label: dict[str, str]) -> list[Family]:
    attempts, phases = Counter[str](), defaultdict[tuple[str, str, str], float](float)
    for span in timeline.spans:
        if span.kind == "attempt":
            attempts[span.role] += 1
        elif span.kind == "phase":
            around = timeline.spans[span.parent or 0]
            attempt = str(around.number) if around.kind == "attempt" else ""
            phases[span.role, attempt, span.name] += span.seconds
    counted = Family(f"{PREFIX}attempts_total", "attempts of the role's ranks, of all runs")
    for role, count in attempts.items():
        counted.add({**label, "role": role}, count)
    spent = Family(f"{PREFIX}phase_seconds_total", "seconds in a phase; the phases of a role add up to its whole time")
    for (role, attempt, phase), seconds in phases.items():
        spent.add({**label, "role": role, "attempt": attempt, "phase": phase}, round(seconds, 3))
    return [counted, spent]
