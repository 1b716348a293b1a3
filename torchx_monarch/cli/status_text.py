# SPDX-License-Identifier: BSD-3-Clause
"""Render the status of a job for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torchx_monarch.insight.rank_activity import RankActivity
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.schedulers.job_status import PHASES, JobStatus, LiveState
from torchx_monarch.system.untrusted_text import one_line

_RUNS = 5
"""Runs of a live allocation that are shown."""

_LATE = 0.001
"""Seconds by which a rank must be late to be named."""

_ODD = 3
"""Ranks that do not run whose state is shown."""


def render(status: JobStatus, now: float | None = None) -> str:
    """Return the status as lines without the last line end; a fact that is not known has no line.

    Args:
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
    if status.spares:
        yield "spares", one_line(", ".join(status.spares))
    for exclusion in status.excluded:
        yield "excluded", one_line(exclusion.message)
    if status.last_failure is not None:
        ago = f"{show_duration(now - status.last_failure.time)} ago: " if status.last_failure.time else ""
        yield "last failure", ago + status.last_failure.message
    if status.hang is not None:
        ago = f"{show_duration(now - status.hang.time)} ago: " if status.hang.time else ""
        yield "hang", ago + status.hang.message
    if status.from_log:
        yield "source", "what the ranks do, and how they failed, is from the log, which ranks can write to"
    printed = [rank.last_output for rank in status.activity or () if rank.last_output is not None]
    if last := max(printed, default=status.last_output):
        yield "last output", f"{show_duration(now - last)} ago"
    yield from _activity(status.activity or ())
    if status.live is not None:
        yield from _live(status.live, now)
    if status.log_folder is not None:
        yield "logs", one_line(status.log_folder)
    for role in status.roles:
        yield (f"command of {role.role}: " if len(status.roles) > 1 else "command"), role.command


def _activity(ranks: Sequence[RankActivity]) -> Iterator[tuple[str, str]]:
    """Yield three facts at most, for any number of ranks."""
    reported = [rank for rank in ranks if rank.progress is not None]
    if reported:
        yield "progress", _progress(min(reported, key=lambda rank: rank.progress.step if rank.progress else 0))
    if rates := [rank.collectives_per_second for rank in ranks if rank.collectives_per_second is not None]:
        text = f"{_range(rates, '{:.1f}')} a second"
        if late := [rank for rank in ranks if (rank.late_by or 0.0) >= _LATE]:
            last = max(late, key=lambda rank: rank.late_by or 0.0)
            text += f"; rank {last.rank} calls them last, {_short(last.late_by or 0.0)} after the first"
        yield "collectives", text
    running = [rank for rank in ranks if rank.state != "ended"]
    if running:
        parts = [f"memory {_range([rank.rss_bytes / (1 << 30) for rank in running], '{:.2f}')} GiB"]
        if cpus := [rank.cpu for rank in running if rank.cpu is not None]:
            parts.insert(0, f"CPU {_range(cpus, '{:.2f}')} cores")
        if busy := [device.busy * 100 for rank in running for device in rank.devices]:
            parts.append(f"GPU {_range(busy, '{:.0f}')} %")
        odd = [f"rank {rank.rank} is {rank.state}" for rank in ranks if rank.state not in ("running", "ended")]
        yield "each rank", "; ".join([", ".join(parts), *odd[:_ODD], *(["…"] if len(odd) > _ODD else [])])


def _progress(rank: RankActivity) -> str:
    progress = rank.progress
    assert progress is not None
    parts = [f"step {progress.step}" + (f" of {progress.total}" if progress.total is not None else "")]
    if rank.seconds_left is not None:
        parts.append(f"{show_duration(rank.seconds_left)} left")
    if progress.checkpoint is not None:
        parts.append(f"checkpoint of step {progress.checkpoint}")
    parts += [f"{name} {value:.4g}" for name, value in progress.metrics.items()]
    return one_line(", ".join(parts), 200)


def _range(values: Sequence[float], form: str) -> str:
    """Return ``0.90`` or ``0.90-1.02``."""
    return "-".join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


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
