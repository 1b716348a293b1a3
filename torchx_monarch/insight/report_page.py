# SPDX-License-Identifier: BSD-3-Clause
"""The page of a report, which loads nothing: a timeline as rows of bars. Also the templates of all pages."""

from __future__ import annotations

from collections import defaultdict
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
    return environment.get_template("report.html").render(page=page, job=job, styles=_STYLES, curve_size=CURVE_SIZE)


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


class Curve(NamedTuple):
    """A metric over the steps of a job, or of several.

    Attributes:
        low, high: the limits of the picture, the smallest and the largest value.
        last: the last value of each job; None of one that has not reported the metric.
        lines: the last values of each attempt, as points of a polyline, with the number of the job.
        bands: between the smallest and the largest values that a point stands for, as points of a polygon.
        starts: where attempts of the first job after its first begin.
    """

    name: str
    first_step: int
    last_step: int
    low: float
    high: float
    last: Sequence[float | None]
    lines: Sequence[tuple[int, str]]
    bands: Sequence[tuple[int, str]]
    starts: Sequence[float]


def curves(*jobs: Sequence[Sequence[Point]]) -> list[Curve]:
    """Return the curves of what the attempts of a role or run have reported, those of several jobs over each other."""
    names = dict.fromkeys(
        name for attempts in jobs for points in attempts for point in points for name in point.metrics
    )
    return [curve for name in [*names][:_MAX_CURVES] if (curve := _curve(name, jobs)) is not None]


def _curve(name: str, jobs: Sequence[Sequence[Sequence[Point]]]) -> Curve | None:
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
    first, last = min(point.step for point in every), max(point.step for point in every)
    width, height = CURVE_SIZE

    def across(point: Point) -> float:
        return round(width * (point.step - first) / ((last - first) or 1), 1)

    def points_of(points: Sequence[Point], which: int) -> list[str]:
        scale = height / (high - low) if high > low else 0.0
        top = 0.0 if scale else height / 2  # a value that never changes is a line in the middle
        downs = (top + scale * (high - point.metrics[name][which]) for point in points)
        return [f"{across(point)},{down:.1f}" for point, down in zip(points, downs, strict=True)]

    ends = {job: points[-1].metrics[name][2] for job, points in having}
    return Curve(
        name=name,
        first_step=first,
        last_step=last,
        low=low,
        high=high,
        last=[ends.get(job) for job in range(len(jobs))],
        lines=[(job, " ".join(points_of(points, 2))) for job, points in having],
        bands=[(job, " ".join(points_of(points, 0) + points_of(points, 1)[::-1])) for job, points in having],
        starts=[across(points[0]) for job, points in having if job == 0][1:],
    )


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
