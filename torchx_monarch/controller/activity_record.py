# SPDX-License-Identifier: BSD-3-Clause
"""Keep what the ranks of each attempt do over time: processor, memory, GPUs, and how late they call collectives."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from torchx_monarch.controller.host_messages import SampleRanks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight.metrics import ACTIVITY, MAX_ROWS, MetricsFile, Point, Values
from torchx_monarch.insight.pace import median
from torchx_monarch.insight.rank_sample import NO_SAMPLES, RankSamples, RankView, rank_views, read_samples

_EVERY = 10.0
"""Seconds between two samples, at least."""

_SHARE = 0.001
"""Share of a core that replica 0 may use: the samples of thousands of ranks take it some time."""

_GIB = 1 << 30

_MEASURED: Mapping[str, Callable[[RankView], float | None]] = {
    "CPU cores": lambda rank: rank.cpu,
    "memory GiB": lambda rank: rank.rss_bytes / _GIB,
    "GPU busy": lambda rank: rank.gpu_busy,
    "GPU memory GiB": lambda rank: None if rank.gpu_bytes is None else rank.gpu_bytes / _GIB,
    "lateness s": lambda rank: rank.late_by,
}
"""What is kept of the ranks, by the name that people see."""


def point_of(ranks: Sequence[RankView], now: float) -> Point:
    """Return what ranks do at one time: of each measure the smallest and the largest value, and the median."""
    metrics: dict[str, Values] = {}
    outliers = {}
    running = [rank for rank in ranks if rank.state not in ("ended", "zombie")]
    for name, measure in _MEASURED.items():
        values = {rank.rank: value for rank in running if (value := measure(rank)) is not None}
        if values:
            middle = median(values.values())
            metrics[name] = min(values.values()), max(values.values()), middle
            farthest = max(running, key=lambda rank: abs(values.get(rank.rank, middle) - middle))
            outliers[name] = f"rank {farthest.rank} on {farthest.host}"
    late = [rank.late_by or 0.0 for rank in ranks]
    rows = min(MAX_ROWS, len(late))
    edges = [row * len(late) // rows for row in range(rows + 1)] if rows else []
    parts = [max(late[first:end]) for first, end in zip(edges, edges[1:], strict=False)]
    step = min((rank.progress.step for rank in running if rank.progress is not None), default=0)
    return Point(step, now, 1, metrics, outliers, tuple(round(seconds, 6) for seconds in parts))


class ActivityRecord:
    """The files of the attempts of a role, on replica 0.

    Args:
        folder: returns where the files of the present attempt are; None for nowhere, or without ranks.
    """

    def __init__(self, hosts: JobHosts, folder: Callable[[], str | None]) -> None:
        self._hosts = hosts
        self._folder = folder
        self._place = ""
        self._file: MetricsFile | None = None
        self._before: RankSamples = NO_SAMPLES

    async def run(self) -> None:
        """Take samples until this task is cancelled."""
        pause, failure = _EVERY, ""
        while True:
            await asyncio.sleep(pause)
            pause, place = _EVERY, self._folder()
            if place is None or not self._hosts.members.are_together:
                await asyncio.to_thread(self._close)
                continue
            try:
                answers = await self._hosts.collect_shared(SampleRanks())
                took = await asyncio.to_thread(self._add, place, [*answers.by_replica.values()])
                pause = max(_EVERY, took / _SHARE)
            except Exception as error:
                if failure != (failure := repr(error)):
                    traceback.print_exc()  # into Monarch's log; the next sample may succeed

    def _add(self, place: str, answers: Sequence[str]) -> float:
        """Add a point to the file of an attempt; return the processor time that this has taken."""
        began = time.thread_time()
        if self._file is None or place != self._place:
            self._close()
            self._file, self._place = MetricsFile(place, ACTIVITY), place
        samples = read_samples(answers)
        if samples.ranks:
            self._file.add_point(point_of(rank_views(samples, self._before), time.time()))
        self._before = samples
        return time.thread_time() - began

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
