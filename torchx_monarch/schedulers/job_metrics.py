# SPDX-License-Identifier: BSD-3-Clause
"""The metrics of a job over all its attempts, restarts and runs, from the files that its ranks have written."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torchx_monarch.backends.core.state_files import path_name
from torchx_monarch.insight.metrics import ACTIVITY, NAME, Point, read_points, sparkline, with_speed
from torchx_monarch.insight.timeline import Span, Timeline
from torchx_monarch.schedulers.job_status import MetricTrend

_TREND = 24
"""Characters of a trend."""


@dataclasses.dataclass(frozen=True)
class AttemptMetrics:
    """What one rank has reported in one attempt, or what all of them did.

    Attributes:
        run: the number of the run of an allocation; 0 for a job that has no runs.
        attempt: the number of the attempt, from 1.
        rank: the rank; None for the activity of all ranks (``read_activity``).
    """

    role: str
    run: int
    attempt: int
    rank: int | None
    points: Sequence[Point]

    def only(self, names: Collection[str]) -> AttemptMetrics:
        """Return the same with metrics of these names alone."""
        points = [
            point._replace(metrics={name: point.metrics[name] for name in names if name in point.metrics})
            for point in self.points
        ]
        return dataclasses.replace(self, points=points)

    def to_json(self) -> dict[str, Any]:
        is_of_all = self.rank is None
        names = ("min", "max", "median" if is_of_all else "last")
        points = []
        for point in self.points:
            metrics = {name: dict(zip(names, values, strict=True)) for name, values in point.metrics.items()}
            shown = {"step": point.step, "time": point.time, "calls": point.calls, "metrics": metrics}
            points.append({**shown, "outliers": point.outliers, "late": point.late} if is_of_all else shown)
        return {**dataclasses.asdict(self), "points": points}


def last_series(attempts: Sequence[AttemptMetrics]) -> list[Sequence[Point]]:
    """Return the points of the attempts of the last role or run."""
    places = [(attempt.role, attempt.run) for attempt in attempts]
    return [attempt.points for attempt, place in zip(attempts, places, strict=True) if place == places[-1]]


def trends(attempts: Sequence[AttemptMetrics]) -> list[MetricTrend]:
    """Return how the metrics of the last role or run have changed in all its attempts."""
    series: dict[str, list[float]] = {}
    for point in itertools.chain(*last_series(attempts)):
        for name, (_, _, last) in point.metrics.items():
            series.setdefault(name, []).append(last)
    return [MetricTrend(name, values[-1], sparkline(values, _TREND)) for name, values in series.items()]


def host_logs(folder: str, timeline: Timeline, attempt: Span) -> Path:
    """Return the folder with a folder of each host that had ranks of an attempt; ``folder`` is that of all logs."""
    other = next(view.logs for view in timeline.roles if view.name == attempt.role)
    return Path(other or os.path.join(folder, path_name(attempt.role)))


def read_metrics(folder: str | None, timeline: Timeline, rank: int | None = None) -> list[AttemptMetrics]:
    """Return what a rank has reported in each attempt, with the speed of its steps, in the order of time.

    Args:
        folder: the folder of the job's logs; None if this machine does not have it: then nothing is known.
        rank: the rank; None for the first rank of each role and attempt that has reported something.
    """
    found = []
    for attempt in timeline.spans_of("attempt") if folder else ():
        logs, pattern = host_logs(folder or "", timeline, attempt), f"*/{timeline.attempt_folder(attempt)}/*/{NAME}"
        paths = {int(path.parent.name): path for path in logs.glob(pattern) if path.parent.name.isdecimal()}
        for number in sorted(paths) if rank is None else {rank} & paths.keys():
            if points := _points(str(paths[number].parent), str(logs.parent), _version(paths[number])):
                found.append(_of_attempt(attempt, number, points))
                break
    return found


def read_activity(folder: str | None, timeline: Timeline) -> list[AttemptMetrics]:
    """Return what the ranks of each attempt did, as replica 0 has kept it; arguments as for ``read_metrics``."""
    found = []
    for attempt in timeline.spans_of("attempt") if folder else ():
        logs = host_logs(folder or "", timeline, attempt)
        place = logs / "0" / timeline.attempt_folder(attempt)
        if points := _points(str(place), str(logs.parent), _version(place / ACTIVITY), ACTIVITY):
            found.append(_of_attempt(attempt, None, points))
    return found


def _of_attempt(attempt: Span, rank: int | None, points: Sequence[Point]) -> AttemptMetrics:
    around = attempt.parent
    run = around.number if around is not None and around.kind == "run" else 0
    return AttemptMetrics(attempt.role, run, attempt.number, rank, points)


@functools.lru_cache(maxsize=256)
def _points(folder: str, below: str, version: int, name: str = NAME) -> Sequence[Point]:
    """Return the points of a file. A page that is live reads the file of an attempt that has ended once."""
    points = read_points(folder, below=below, name=name)
    return with_speed(points) if points and name == NAME else points


def _version(path: Path) -> int:
    """Return a number that changes with a file: two changes of this moment may have the same time."""
    now = time.time_ns()
    try:
        changed = path.stat().st_mtime_ns
    except OSError:  # a job that was deleted
        return now
    return now if changed > now - 10**9 else changed
