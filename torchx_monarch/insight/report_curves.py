# SPDX-License-Identifier: BSD-3-Clause
"""Lay out the curves of what ranks used: memory, processors and GPU memory over the time of the job."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from torchx_monarch.insight.sample_log import SampledMoment
from torchx_monarch.insight.timeline import Span

WIDTH, HEIGHT = 1000, 100
"""The size of a curve's own coordinates, which the page stretches."""

_LINES = 8
"""Ranks that have a line each; of more ranks the lowest, the middle and the highest value are shown."""

_POINTS = 600

_GIB = float(1 << 30)

_Values = Mapping[int, float]
"""A value of each rank at one moment."""


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
    if len(ranks) > _LINES:
        names = ["lowest", "middle", "highest"]
        ordered = [sorted(by_rank.values()) for by_rank in values]
        values = [
            {0: ascending[0], 1: ascending[len(ascending) // 2], 2: ascending[-1]} if ascending else {}
            for ascending in ordered
        ]
        ranks = [0, 1, 2]
    else:
        names = [f"rank {rank}" for rank in ranks]
    lines = []
    for colour, (rank, title) in enumerate(zip(ranks, names, strict=True)):
        parts: list[list[str]] = [[]]
        attempt = None
        for by_rank, moment in zip(values, moments, strict=True):
            if attempt != moment.attempt or rank not in by_rank:
                parts.append([])
            attempt = moment.attempt
            if rank in by_rank:
                x = WIDTH * (moment.time - job.start) / (job.seconds or 1.0)
                parts[-1].append(f"{x:.1f},{HEIGHT * (1 - by_rank[rank] / most):.1f}")
        lines.append(Line(title, colour, [" ".join(part) for part in parts if len(part) > 1]))
    return Curve(name, show(most), lines)
