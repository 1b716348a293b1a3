# SPDX-License-Identifier: BSD-3-Clause
"""The page of a report, which loads nothing: a timeline as rows of bars, and curves of what the ranks used."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined

from torchx_monarch.insight.sample_log import SampledMoment
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.insight.timeline import PHASES, Span, Timeline

_RANKS_SHOWN = 64
"""Ranks that have a row each; those of more ranks share one for each host."""

_ROWS_SHOWN = 256

_TICKS = 4
"""Least number of parts into which the axis is divided; a phone has room for twice as many."""

_STEPS = [step * unit for unit in (0.001, 0.01, 0.1, 1) for step in (1, 2, 5)] + [
    *(10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
]

WIDTH, HEIGHT = 1000, 100
"""The size of a curve's own coordinates, which the page stretches."""

_LINES = 8
"""Ranks that have a line each; of more ranks the lowest, the middle and the highest value are shown."""

_POINTS = 600

_GIB = float(1 << 30)

_Values = Mapping[int, float]
"""A value of each rank at one moment."""


def render(page: Mapping[str, object], start: float) -> str:
    """Return the HTML of a page, of values of any content: the template ``report.html`` escapes them.

    Args:
        page: the values that the template names; sections whose lists are empty are left out.
        start: when the job was submitted, in seconds since the epoch.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = show_duration
    environment.filters["since"] = lambda time: show_duration(time - start)
    source = resources.files("torchx_monarch.insight").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page, styles=_STYLES)


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar of the picture.

    Attributes:
        left: where it begins, in percent of the width.
        width: its width in percent.
        style: which colour it has: the name of a phase with ``-`` for blanks, or of another style.
        title: what it stands for.
    """

    left: float
    width: float
    style: str
    title: str


@dataclasses.dataclass(frozen=True)
class BarRow:
    """A row of the picture.

    Attributes:
        label: its name.
        bars: its bars; later ones cover earlier ones.
        description: what it shows, for people who hear the page.
    """

    label: str
    bars: Sequence[Bar]
    description: str


@dataclasses.dataclass(frozen=True)
class Tick:
    """A line of the axis: its place in percent, and its time since the submission."""

    left: float
    label: str


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a role's time that a phase takes, with the phase's meaning and its style."""

    phase: str
    style: str
    meaning: str
    seconds: float
    percent: float


@dataclasses.dataclass(frozen=True)
class Picture:
    """The picture.

    Attributes:
        rows: its rows.
        ticks: its axis.
        left_out: number of rows that are left out at the end.
    """

    rows: Sequence[BarRow]
    ticks: Sequence[Tick]
    left_out: int


def picture(timeline: Timeline) -> Picture:
    """Return the picture of a timeline."""
    job, rows = timeline.job, list[BarRow]()
    roles = [span.name for span in timeline.spans_of("role")]
    for role in roles:
        prefix = f"{role} " if len(roles) > 1 else ""
        bars = [_bar(span, job, _style(span.name)) for span in timeline.spans_of("phase", role)]
        failures = [
            moment for moment in timeline.moments if moment.kind in ("failure", "hang") and moment.role in ("", role)
        ]
        marks = [_mark(failure.time, job, f"{failure.kind}: {failure.text}") for failure in failures]
        rows.append(_row(f"{prefix}phases", [*bars, *marks]))
        if runs := timeline.spans_of("run", role):
            rows.append(_row(f"{prefix}runs", [_bar(span, job, _outcome(span)) for span in runs]))
        attempts = timeline.spans_of("attempt", role)
        if len(attempts) > 1:
            rows.append(_row(f"{prefix}attempts", [_bar(span, job, "attempt") for span in attempts]))
        rows += _hosts(timeline, role, prefix)
    return Picture(rows[:_ROWS_SHOWN], _ticks(job.seconds), max(0, len(rows) - _ROWS_SHOWN))


def shares(timeline: Timeline, role: str) -> list[Share]:
    """Return how long each phase of a role took in all, in the order of the phases."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for span in timeline.spans_of("phase", role):
        seconds[span.name] += span.seconds
    whole = timeline.job.seconds or 1.0
    return [
        Share(name, _style(name), PHASES[name], duration, 100 * duration / whole)
        for name, duration in seconds.items()
        if duration
    ]


def _hosts(timeline: Timeline, role: str, prefix: str) -> list[BarRow]:
    """Return the rows of imports and ranks."""
    job, ranks, imports = timeline.job, timeline.spans_of("rank", role), timeline.spans_of("import", role)
    rows = []
    folded = len({span.number for span in ranks}) > _RANKS_SHOWN
    hosts: dict[int, tuple[list[Span], list[Span]]] = {}
    for index, spans in enumerate((ranks, imports)):
        for span in spans:
            if span.replica is not None:
                hosts.setdefault(span.replica, ([], []))[index].append(span)
    for host, (of_host, imported) in sorted(hosts.items()):
        if not of_host:
            continue
        bars = [_bar(span, job, "import") for span in imported]
        if folded:
            bars += [_bar(span, job, _outcome(span)) for span in of_host]
            rows.append(_row(f"{prefix}host {host}", bars))
            continue
        for number in sorted({span.number for span in of_host}):
            own = [_bar(span, job, _outcome(span)) for span in of_host if span.number == number]
            rows.append(_row(f"{prefix}rank {number}", [*bars, *own]))
    return rows


def _row(label: str, bars: Sequence[Bar]) -> BarRow:
    return BarRow(label, bars, f"{label}: {'; '.join(bar.title for bar in bars[:20])}")


def _bar(span: Span, job: Span, style: str) -> Bar:
    name = span.name
    if span.code is not None:
        name += f", exit code {span.code}"
    if span.grouped is not None:
        name += f", process group after {show_duration(span.grouped - span.start)}"
    at = show_duration(span.start - job.start)
    return Bar(*_place(span.start, span.end, job), style, f"{name}: {show_duration(span.seconds)} from {at}")


def _mark(time: float, job: Span, title: str) -> Bar:
    return Bar(_place(time, time, job)[0], 0.0, "failure", title)


def _place(start: float, end: float, job: Span) -> tuple[float, float]:
    whole = job.seconds or 1.0
    return round(100 * (start - job.start) / whole, 3), round(100 * (end - start) / whole, 3)


def _style(phase: str) -> str:
    return phase.replace(" ", "-")


_STYLES = [*map(_style, PHASES), "import", "attempt", "failed", "stopped"]
"""The names of the colours."""


def _outcome(span: Span) -> str:
    """Return the style of a rank or a run."""
    return "running" if span.code in (None, 0) else "stopped" if span.secondary else "failed"


def _ticks(seconds: float) -> list[Tick]:
    fitting = [step for step in _STEPS if seconds / step >= _TICKS]
    step = fitting[-1] if fitting else seconds or 1.0
    if seconds / step > 2 * _TICKS:
        step = seconds / _TICKS
    return [
        Tick(round(100 * step * at / (seconds or 1.0), 3), _clock(step * at)) for at in range(int(seconds / step) + 1)
    ]


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s" if seconds == round(seconds, 3) else f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d} h" if hours else f"{rest // 60}:{rest % 60:02d} min"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line: its name, the number of its colour, and the points of each of its unbroken parts, as SVG has them."""

    name: str
    colour: int
    parts: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Curve:
    """The lines of one quantity: its name, what the upper edge stands for, and the lines."""

    name: str
    most: str
    lines: Sequence[Line]


def curves(moments: Sequence[SampledMoment], job: Span) -> list[Curve]:
    """Return the curves; none if there are fewer than two moments."""
    plotted = [moment for moment in moments if job.start <= moment.time <= job.end and moment.ranks]
    plotted = plotted[:: len(plotted) // _POINTS + 1]
    if len(plotted) < 2:
        return []
    memory = [{rank.rank: rank.rss_bytes / _GIB for rank in moment.ranks} for moment in plotted]
    devices = [{rank.rank: rank.device_bytes / _GIB for rank in moment.ranks} for moment in plotted]
    busy: list[_Values] = [{}]
    for before, after in itertools.pairwise(plotted):
        spent = {rank.rank: rank.cpu_seconds for rank in before.ranks} if before.attempt == after.attempt else {}
        past = after.time - before.time
        busy.append(
            {
                rank.rank: max(0.0, (rank.cpu_seconds - spent[rank.rank]) / past)
                for rank in after.ranks
                if rank.rank in spent and past > 0
            }
        )
    found = [
        _curve("memory of a rank", memory, plotted, job, lambda most: f"{most:.2f} GiB"),
        _curve("processors in use by a rank", busy, plotted, job, lambda most: f"{most:.2f}"),
        _curve("GPU memory of a rank", devices, plotted, job, lambda most: f"{most:.2f} GiB"),
    ]
    return [curve for curve in found if curve is not None]


def _curve(
    name: str, values: Sequence[_Values], moments: Sequence[SampledMoment], job: Span, show: Callable[[float], str]
) -> Curve | None:
    """Return a curve; None if there is nothing but zeros."""
    most = max((value for by_rank in values for value in by_rank.values()), default=0.0)
    if not most:
        return None
    ranks = sorted({rank for by_rank in values for rank in by_rank})
    series: dict[str, list[float | None]]
    if len(ranks) <= _LINES:
        series = {f"rank {rank}": [by_rank.get(rank) for by_rank in values] for rank in ranks}
    else:
        ordered: list[Sequence[float | None]] = [sorted(by_rank.values()) or (None,) for by_rank in values]
        series = {
            "lowest": [ascending[0] for ascending in ordered],
            "middle": [ascending[len(ascending) // 2] for ascending in ordered],
            "highest": [ascending[-1] for ascending in ordered],
        }
    lines = [
        Line(title, colour, _parts(points, moments, job, most)) for colour, (title, points) in enumerate(series.items())
    ]
    return Curve(name, show(most), lines)


def _parts(values: Sequence[float | None], moments: Sequence[SampledMoment], job: Span, most: float) -> list[str]:
    """Return the points of a line, which is broken where a value is missing and between attempts."""
    parts: list[list[str]] = [[]]
    attempt = None
    for value, moment in zip(values, moments, strict=True):
        if attempt != moment.attempt or value is None:
            parts.append([])
        attempt = moment.attempt
        if value is not None:
            x = WIDTH * (moment.time - job.start) / (job.seconds or 1.0)
            parts[-1].append(f"{x:.1f},{HEIGHT * (1 - value / most):.1f}")
    return [" ".join(part) for part in parts if len(part) > 1]
