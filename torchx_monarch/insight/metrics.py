# SPDX-License-Identifier: BSD-3-Clause
"""The metrics that a rank has reported over time (``torchx_monarch.progress``), in a file of bounded size.

The rank writes the file itself, ``attempt_N/RANK/metrics.jsonl``, so its values are there however it ends. A line, a
point, stands for some calls in a row: their last step and its time, their number, and of each metric the smallest, the
largest and the last value. When there are ``MAX_POINTS`` points, each two in a row become one.

Standard library only: every rank imports it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line

NAME = "metrics.jsonl"
"""Name of the file."""

ACTIVITY = "activity.jsonl"
"""Name of the file of the same kind with what all ranks of an attempt do, in the attempt's folder on replica 0."""

MAX_POINTS = 512

MAX_METRICS = 16

MAX_ROWS = 64
"""Ranks whose lateness has a number each."""

MAX_NAME = 64
"""Characters of the name of a metric."""

SPEED = "steps a second"
"""Name of a metric that readers derive."""

_SPEEDS = 64
"""Speeds that are derived for each attempt."""

_MAX_BYTES = 1 << 21
"""Bytes of a file that are read: all of one that our code has written."""

Values = tuple[float, float, float]
"""The smallest, the largest and the last value of a metric."""


class Point(NamedTuple):
    """Some calls in a row.

    Attributes:
        step: the last step.
        time: when it was reported, in seconds since the epoch.
        calls: the number of calls.
        metrics: their values, by name.
        outliers: of the activity of all ranks, the rank farthest from the median, by the name of the metric.
        late: the seconds by which each rank was late, or the most of each of ``MAX_ROWS`` equal parts of them.
        checkpoint: the step of the last checkpoint; None for none.
    """

    step: int
    time: float
    calls: int
    metrics: Mapping[str, Values]
    outliers: Mapping[str, str] = {}
    late: tuple[float, ...] = ()
    checkpoint: int | None = None

    def joined(self, later: Point) -> Point:
        """Return one point for this one and the next."""
        metrics = dict(self.metrics)
        for name, (low, high, last) in later.metrics.items():
            before = metrics.get(name, (low, high, last))
            metrics[name] = min(low, before[0]), max(high, before[1]), last
        outliers = {**self.outliers}
        for name, rank in later.outliers.items():
            if name not in self.metrics or later.metrics[name][1] >= self.metrics[name][1]:
                outliers[name] = rank
        late = tuple(map(max, itertools.zip_longest(self.late, later.late, fillvalue=0.0)))
        return Point(later.step, later.time, self.calls + later.calls, metrics, outliers, late, later.checkpoint)

    def line(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def parse(cls, line: bytes) -> Point | None:
        """Parse a line; return None for one that the rank has not written whole, or that something else has."""
        from torchx_monarch.model.codec import decode  # not in ranks, which write points

        with contextlib.suppress(ValueError, TypeError):
            point = decode(cls, dict(zip(cls._fields, safe_files.parse_json(line), strict=True)))
            if all(len(values) == 3 for values in point.metrics.values()):
                metrics = {one_line(name[:MAX_NAME]): point.metrics[name] for name in [*point.metrics][:MAX_METRICS]}
                outliers = {name: one_line(rank[:MAX_NAME]) for name, rank in point.outliers.items() if name in metrics}
                return point._replace(metrics=metrics, outliers=outliers, late=point.late[:MAX_ROWS])
        return None


def read_points(folder: str, below: str | None = None, name: str = NAME) -> list[Point]:
    """Return what a rank has reported, in order; empty without a file of its user.

    Args:
        folder: where its logs are.
        name: the name of the file.
        below: as for ``safe_files.open_file``.
    """
    with contextlib.suppress(OSError):
        data = safe_files.read_file(os.path.join(folder, name), limit=_MAX_BYTES, below=below)
        points = (Point.parse(line) for line in data.splitlines()[: 2 * MAX_POINTS])
        return [point for point in points if point is not None]
    return []


def with_speed(points: Sequence[Point]) -> list[Point]:
    """Return points of which some have the steps per second since the one before as a metric more."""
    found, before = list(points), points[0]
    distance = max(1, len(points) // _SPEEDS)  # a step alone may wait for another process of the machine
    for at in range(distance, len(points), distance):
        point = points[at]
        steps, seconds = point.step - before.step, point.time - before.time
        if steps > 0 and seconds > 0:
            found[at] = point._replace(metrics={**point.metrics, SPEED: (steps / seconds,) * 3})
        before = point
    return found


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a line of at most ``width`` characters whose heights are values; empty for fewer than two."""
    width = min(width, len(values))
    ends = [len(values) * (at + 1) // width for at in range(width)]
    return "" if len(values) < 2 else sparklines([[values[end - 1] for end in ends]])[0]


def sparklines(series: Sequence[Sequence[float | None]]) -> list[str]:
    """Return lines whose heights are values, all on one scale; None leaves a character free."""
    known = [value for values in series for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_LEVELS) - 1) / (high - low or 1.0)
    return [
        "".join(" " if value is None else _LEVELS[round((value - low) * scale)] for value in values)
        for values in series
    ]


class MetricsFile:
    """The file, as its rank writes it. A full disk ends it, and not the program.

    Args:
        folder: where the logs of the rank are. The path is not resolved: the rank may change its working folder.
    """

    def __init__(self, folder: str, name: str = NAME) -> None:
        self._path = os.path.join(folder, name)
        self._points: list[Point] = []
        self._calls = 1
        """The number of calls for which a point stands."""
        self._end = 0
        """Where the last point begins, and its line until then had ``_length`` bytes."""
        self._length = 0
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = self._opened(self._path)

    @staticmethod
    def _opened(path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o600)

    def add(self, step: int, time: float, metrics: Mapping[str, float], checkpoint: int | None = None) -> None:
        """Add what one call has reported."""
        values = {name: (value, value, value) for name, value in metrics.items()}
        self.add_point(Point(step, time, 1, values, checkpoint=checkpoint))

    def add_point(self, point: Point) -> None:
        """Add a point for one call."""
        if self._fd < 0:
            return
        try:
            if self._points and self._points[-1].calls < self._calls:
                self._points[-1] = self._points[-1].joined(point)
            else:
                if len(self._points) == MAX_POINTS:
                    self._thin()
                self._points.append(point)
                self._end, self._length = self._end + self._length, 0
            self._write_last()
        except OSError:
            self.close()

    def close(self) -> None:
        """Write nothing any more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write_last(self) -> None:
        # Over the line of the same point before, which may have been longer; JSON ends with any number of spaces.
        line = self._points[-1].line().ljust(self._length - 1) + b"\n"
        os.pwrite(self._fd, line, self._end)
        self._length = len(line)

    def _thin(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=True)
        self._points = [first.joined(second) for first, second in pairs]
        self._calls *= 2
        aside = f"{self._path}.new"
        fd = self._opened(aside)
        try:
            data = b"".join(point.line() + b"\n" for point in self._points)
            os.pwrite(fd, data, 0)
            os.rename(aside, self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._end, self._length = fd, len(data), 0
