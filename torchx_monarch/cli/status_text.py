# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Render the status of a job for people."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torchx_monarch.insight.summary import show_duration
from torchx_monarch.schedulers.job_status import PHASES, JobStatus, LiveState
from torchx_monarch.system.untrusted_text import one_line

_RUNS = 5
"""Runs of a live allocation that are shown."""


def render(status: JobStatus, now: float | None = None) -> str:
    """Return the status as lines without the last line end; a fact that is not known has no line.

    Args:
        status: the status.
        now: the time in seconds since the epoch; None for the present.
    """
    now = time.time() if now is None else now
    word = "after" if status.has_ended else "for"
    took = f" {word} {show_duration(status.elapsed)}" if status.elapsed is not None else ""
    lines = [f"{one_line(status.handle)}: {status.state}{took}"]
    lines += [f"  {title:<13}{text}" for title, text in _facts(status, now)]
    return "\n".join(lines)


def _facts(status: JobStatus, now: float) -> Iterator[tuple[str, str]]:
    if status.message:
        yield "message", status.message
    if status.phase is not None:
        yield "phase", PHASES[status.phase]
    if status.exit_code is not None:
        yield "exit code", str(status.exit_code)
    if status.attempt is not None:
        yield "attempt", f"{status.attempt}{f' of {status.attempts}' if status.attempts is not None else ''}"
    if status.restarts:
        yield "restarts", str(status.restarts)
    if size := size_of(status):
        yield "hosts", size + (f" (world size {status.ranks})" if status.ranks is not None else "")
    if status.last_failure is not None:
        ago = f"{show_duration(now - status.last_failure.time)} ago: " if status.last_failure.time else ""
        yield "last failure", ago + status.last_failure.message
    if status.hang is not None:
        ago = f"{show_duration(now - status.hang.time)} ago: " if status.hang.time else ""
        yield "hang", ago + status.hang.message
    if status.last_output is not None:
        yield "last output", f"{show_duration(now - status.last_output)} ago"
    if status.live is not None:
        yield from _live(status.live, now)
    if status.log_folder is not None:
        yield "logs", one_line(status.log_folder)
    for role in status.roles:
        yield (f"command of {role.role}: " if len(status.roles) > 1 else "command"), role.command


def _live(live: LiveState, now: float) -> Iterator[tuple[str, str]]:
    runs = f"{live.runs} so far"
    if live.run is not None:
        runs += f", run {live.run} runs"
    if live.queued:
        runs += f", {live.queued} queued"
    yield "runs", runs
    for run in live.last_runs[-_RUNS:]:
        code = "" if run["exit_code"] is None else f" with {run['exit_code']}"
        took = f" for {show_duration((run['ended'] or now) - run['started'])}" if run["started"] else ""
        yield "", one_line(f"run {run['run']} {run['state']}{code}{took}: {' '.join(run['command'].split())}", 200)
    if live.run is None:
        limit = f" of {show_duration(live.idle_timeout)}" if live.idle_timeout else ""
        yield "idle", f"{show_duration(live.idle)}{limit}"


def size_of(status: JobStatus) -> str:
    """Return the number of hosts, and of ranks on each: ``2x4``; empty if it is not known."""
    if status.hosts is None:
        return ""
    if status.ranks is None:
        return str(status.hosts)
    if status.ranks % status.hosts:
        return f"{status.hosts} with {status.ranks} ranks"
    return f"{status.hosts}x{status.ranks // status.hosts}"
