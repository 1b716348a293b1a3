# SPDX-License-Identifier: BSD-3-Clause
"""The page of a report, which loads nothing: a timeline as rows of bars. Also the templates of all pages."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchx_monarch.insight.metrics import Point
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.insight.timeline import PHASES, Moment, Span, Timeline

_MAX_RANK_ROWS = 64
"""Ranks that have a row each; those of more ranks share one for each host."""

_MARKS = ("failure", "hang")
"""The kinds of moments that are marked in the picture."""

_TICKS = 4
"""Half the number of parts into which the axis may be divided: a phone has room for eight."""

_STEPS = [step * unit for unit in (0.001, 0.01, 0.1, 1) for step in (1, 2, 5)]
_STEPS += [10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400]


def render(page: Mapping[str, object], job: Span) -> str:
    """Return the HTML of a page, by the template ``report.html``.

    Places are in percent of the job, and times count from its start.
    """
    environment = templates()
    whole = job.seconds or 1.0
    environment.filters["since"] = lambda time: show_duration(time - job.start)
    environment.filters["percent"] = lambda seconds: round(100 * seconds / whole, 3)
    environment.filters["clock"] = _clock
    environment.filters["style"] = _style
    return environment.get_template("report.html").render(
        page=page, job=job, styles=_STYLES, curve_size=CURVE_SIZE, late_columns=_COLUMNS
    )


def templates() -> Environment:
    """Return the templates of pages. They escape values, which may have any content."""
    files = PackageLoader("torchx_monarch", "insight")
    environment = Environment(
        loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["duration"] = show_duration
    environment.filters["value"] = lambda value: "unknown" if value is None else f"{value:.4g}"
    return environment


class BarRow(NamedTuple):
    """A row of the picture: its name, its spans with their styles, and what failed. Later bars cover earlier ones."""

    label: str
    bars: Sequence[tuple[Span, str]]
    marks: Sequence[Moment] = ()


def rows_of(timeline: Timeline) -> list[BarRow]:
    """Return the rows of the picture of a timeline."""
    rows = list[BarRow]()
    roles = [span.name for span in timeline.spans_of("role")]
    for role in roles:
        prefix = f"{role} " if len(roles) > 1 else ""
        marks = [moment for moment in timeline.moments if moment.kind in _MARKS and moment.role in ("", role)]
        phases = [(span, _style(span.name)) for span in timeline.spans_of("phase", role)]
        rows.append(BarRow(f"{prefix}phases", phases, marks))
        if runs := timeline.spans_of("run", role):
            rows.append(BarRow(f"{prefix}runs", [(span, _outcome(span)) for span in runs]))
        attempts = timeline.spans_of("attempt", role)
        if len(attempts) > 1:
            rows.append(BarRow(f"{prefix}attempts", [(span, "attempt") for span in attempts]))
        rows += _rows_of_ranks(timeline, role, prefix)
    return rows


def _rows_of_ranks(timeline: Timeline, role: str, prefix: str) -> list[BarRow]:
    ranks = timeline.spans_of("rank", role)
    is_folded = len({span.number for span in ranks}) > _MAX_RANK_ROWS
    imports = defaultdict[int | None, list[Span]](list)
    for span in timeline.spans_of("import", role):
        imports[span.replica].append(span)
    rows: dict[tuple[int | None, str], list[tuple[Span, str]]] = {}
    hangs = [phase for phase in timeline.spans_of("phase", role) if phase.awaited]
    for span in sorted(ranks, key=lambda span: (span.replica or 0, span.number)):
        place = (span.replica, f"host {span.replica}" if is_folded else span.name)
        bars = rows.setdefault(place, [(imported, "ranks") for imported in imports[span.replica]])
        bars.append((span, _outcome(span)))
        for hang in hangs:
            if hang.parent is span.parent and any(span.number in ranks for ranks in hang.awaited):
                bars.append((hang, "hang"))
    return [BarRow(prefix + name, bars) for (_, name), bars in rows.items()]


def legend(rows: Sequence[BarRow]) -> list[tuple[str, str]]:
    """Return the colours of the bars in these rows, as the names of styles, with their meanings."""
    meanings = {_style(name): name for name in PHASES}
    meanings |= {"ranks": "ranks start, torch is imported", "hang": "hang, also of the rank that others wait for"}
    used = {"running" if style in _ENDS else style for row in rows for _, style in row.bars}
    return [(style, meaning) for style, meaning in meanings.items() if style in used]


def ticks(seconds: float) -> list[float]:
    """Return the times of the axis: round ones, since the submission."""
    step = next((step for step in _STEPS if seconds / step < 2 * _TICKS), seconds / _TICKS) or 1.0
    return [step * at for at in range(int(seconds / step) + 1)]


class Share(NamedTuple):
    """How long a phase of a role took in all, its meaning, and its part of the role's time in percent."""

    phase: str
    meaning: str
    seconds: float
    percent: float


def shares(timeline: Timeline, role: str) -> list[Share]:
    """Return how long each phase of a role took in all, in the order of the phases."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for span in timeline.spans_of("phase", role):
        seconds[span.name] += span.seconds
    whole = timeline.job.seconds or 1.0
    return [
        Share(name, PHASES[name], duration, 100 * duration / whole) for name, duration in seconds.items() if duration
    ]


# -- curves ------------------------------------------------------------------------------------------------------------

CURVE_SIZE = 1000, 120
"""Width and height of the picture of a curve, in its own units."""

_MAX_CURVES = 8

_MARKS_OF_CURVES = ("hang", "slow")
"""The kinds of moments that are marked in curves, at the last values before."""


class Curve(NamedTuple):
    """A metric over the steps of a job, or of several, or over its time.

    Attributes:
        begin, end: the first and the last step, or time.
        low, high: the limits of the picture, the smallest and the largest value.
        last: the last value of each job; None of one that has not reported the metric.
        lines: the last values of each attempt, as points of a polyline, with the number of the job.
        bands: between the smallest and the largest values that a point stands for, as points of a polygon.
        starts: where attempts of the first job after its first begin.
        outlier: the rank farthest from the others when the value was the largest; empty if that is not known.
        marks: where ranks hung, or were slow.
        checkpoints: where the job, if it is one, had a newer checkpoint.
    """

    name: str
    begin: str
    end: str
    low: float
    high: float
    last: Sequence[float | None]
    lines: Sequence[tuple[int, str]]
    bands: Sequence[tuple[int, str]]
    starts: Sequence[float]
    outlier: str
    marks: Sequence[tuple[float, Moment]]
    checkpoints: Sequence[float]


def curves(*jobs: Sequence[Sequence[Point]], over: Span | None = None, moments: Sequence[Moment] = ()) -> list[Curve]:
    """Return the curves of what the attempts of a role or run have reported, those of several jobs over each other.

    Args:
        over: over whose time; None for over their steps.
        moments: what happened meanwhile to the first job.
    """
    names = dict.fromkeys(
        name for attempts in jobs for points in attempts for point in points for name in point.metrics
    )
    marked = [moment for moment in moments if moment.kind in _MARKS_OF_CURVES]
    return [curve for name in [*names][:_MAX_CURVES] if (curve := _curve(name, jobs, over, marked)) is not None]


def _curve(
    name: str, jobs: Sequence[Sequence[Sequence[Point]]], over: Span | None, moments: Sequence[Moment]
) -> Curve | None:
    having = [
        (job, found)
        for job, attempts in enumerate(jobs)
        for points in attempts
        if (found := [point for point in points if name in point.metrics])
    ]
    every = [point for _, points in having for point in points]
    if len(every) < 2:
        return None
    low, high = min(point.metrics[name][0] for point in every), max(point.metrics[name][1] for point in every)
    width, height = CURVE_SIZE
    places = [float(point.step) for point in every] if over is None else [over.start, over.end]
    first, last = min(places), max(places)

    def across(point: Point) -> float:
        place = point.step if over is None else point.time
        return round(width * (place - first) / ((last - first) or 1), 1)

    def points_of(points: Sequence[Point], which: int) -> list[str]:
        scale = height / (high - low) if high > low else 0.0
        top = 0.0 if scale else height / 2  # a value that never changes is a line in the middle
        downs = (top + scale * (high - point.metrics[name][which]) for point in points)
        return [f"{across(point)},{down:.1f}" for point, down in zip(points, downs, strict=True)]

    timed = sorted((point for job, points in having if job == 0 for point in points), key=lambda point: point.time)
    marks = []
    for moment in moments:
        if before := [point for point in timed if point.time <= moment.time]:
            marks.append((across(before[-1]), moment))
    ends = {job: points[-1].metrics[name][2] for job, points in having}
    return Curve(
        name=name,
        begin=f"step {first:.0f}" if over is None else "0 s",
        end=f"{last:.0f}" if over is None else show_duration(over.seconds),
        low=low,
        high=high,
        last=[ends.get(job) for job in range(len(jobs))],
        lines=[(job, " ".join(points_of(points, 2))) for job, points in having],
        bands=[(job, " ".join(points_of(points, 0) + points_of(points, 1)[::-1])) for job, points in having],
        starts=[across(points[0]) for job, points in having if job == 0][1:],
        outlier=max(every, key=lambda point: point.metrics[name][1]).outliers.get(name, ""),
        marks=marks,
        checkpoints=[
            across(point)
            for _, points in (having if len(jobs) == 1 else ())
            for before, point in itertools.pairwise(points)
            if point.checkpoint != before.checkpoint
        ],
    )


# -- lateness ----------------------------------------------------------------------------------------------------------

_MAX_LATE_ROWS = 16
"""Ranks whose lateness is drawn: those that were the latest."""

_COLUMNS = 64

_LEAST_LATE = 0.001
"""Seconds by which some rank must be late."""

_LEAST_SHARE = 0.02
"""Share of the largest lateness that is drawn."""


class LateRow(NamedTuple):
    """A row of the heat map: a rank or some, its largest lateness, and when it was late how much.

    Attributes:
        cells: columns of ``_COLUMNS`` with the lateness there, as a share of the largest of all rows.
    """

    label: str
    most: float
    cells: Sequence[tuple[int, float]]


def late_rows(attempts: Sequence[Sequence[Point]], timeline: Timeline, role: str) -> list[LateRow]:
    """Return the heat map of how late the ranks of a role were, over the time of the job; empty if none was.

    Args:
        attempts: the activity of the ranks of each attempt.
    """
    job, started = timeline.job, Counter(id(rank.parent) for rank in timeline.spans_of("rank", role))
    worst: dict[tuple[int, int], float] = {}
    for points in attempts:
        before = None
        for point in points:
            edges = [_COLUMNS * (at - job.start) / (job.seconds or 1) for at in (before or point.time, point.time)]
            before = point.time
            for column in range(max(0, int(edges[0])), min(_COLUMNS - 1, int(edges[1])) + 1):
                for row, late in enumerate(point.late):
                    worst[row, column] = max(worst.get((row, column), 0.0), late)
    count = max((row for row, _ in worst), default=-1) + 1
    ranks = max([count, *started.values()])
    most = [max((late for (at, _), late in worst.items() if at == row), default=0.0) for row in range(count)]
    shown = sorted(sorted(range(count), key=lambda row: -most[row])[:_MAX_LATE_ROWS])
    if max(most, default=0.0) < _LEAST_LATE:
        return []
    found = []
    for row in shown:
        first, last = row * ranks // count, (row + 1) * ranks // count - 1
        label = f"ranks {first}-{last}" if last > first else f"rank {row}"
        cells = [(column, late / max(most)) for (at, column), late in sorted(worst.items()) if at == row]
        found.append(LateRow(label, most[row], [cell for cell in cells if cell[1] >= _LEAST_SHARE]))
    return found


def _style(phase: str) -> str:
    return phase.replace(" ", "-")


_STYLES = [*map(_style, PHASES), "attempt"]
"""The names of the colours."""

_ENDS = ("failed", "stopped")
"""How a rank or run may have ended: a mark, at the end of a bar in the colour of those that ran."""


def _outcome(span: Span) -> str:
    return "running" if span.code in (None, 0) else "stopped" if span.secondary else "failed"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s" if seconds == round(seconds, 3) else f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d} h" if hours else f"{rest // 60}:{rest % 60:02d} min"
