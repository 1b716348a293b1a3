# SPDX-License-Identifier: BSD-3-Clause
"""A table of ranks: rows of two samples of each rank, folded by host on request, and cut to the width of a terminal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.insight.stacks import rank_ranges
from torchx_monarch.system.untrusted_text import one_line

_HOST_WIDTH = 12
"""The most characters of a host's name that are shown; the end of longer names, which tells hosts apart."""

_RANKS_WIDTH = 11
"""The most characters of the numbers of a host's ranks."""

_GAP = "  "


@dataclasses.dataclass(frozen=True)
class Row:
    """A rank, or all ranks of a host. None is a value that is not known.

    Attributes:
        ranks: the global ranks.
        host: name of the machine.
        pid: process id; None for several ranks.
        state: what the ranks do, see ``RankSample``; ``7 running, 1 stopped`` for several states.
        cpu: cores that the ranks use.
        rss_bytes: their resident memory.
        gpu_bytes: the memory that they have on GPUs.
        gpu_busy: part of the time in which these GPUs compute, the mean of all.
        rate: collectives of each rank per second.
        late: seconds for which other ranks wait for this one in a collective.
        line: the last line that was printed.
    """

    ranks: tuple[int, ...]
    host: str
    pid: int | None
    state: str
    cpu: float | None = None
    rss_bytes: int = 0
    gpu_bytes: int | None = None
    gpu_busy: float | None = None
    rate: float | None = None
    late: float | None = None
    line: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the row as JSON values."""
        return dataclasses.asdict(self)


def rows(samples: Iterable[RankSample], before: Iterable[RankSample] = ()) -> list[Row]:
    """Return a row for each rank, in the order of ranks."""
    earlier = {(sample.host, sample.pid): sample for sample in before}
    ordered = sorted(samples, key=lambda sample: sample.rank)
    late = _late(ordered)
    found = []
    for sample in ordered:
        past = earlier.get((sample.host, sample.pid))
        seconds = sample.time - past.time if past is not None and past.attempt == sample.attempt else 0.0
        cpu = rate = None
        if past is not None and seconds > 0:
            cpu = max(0.0, sample.cpu_seconds - past.cpu_seconds) / seconds
            rate = max(0, sample.collectives - past.collectives) / seconds if sample.groups else None
        found.append(
            Row(
                (sample.rank,),
                sample.host,
                sample.pid,
                sample.state,
                cpu,
                sample.rss_bytes,
                sum(device.memory_bytes for device in sample.devices) if sample.devices else None,
                sum(device.busy for device in sample.devices) / len(sample.devices) if sample.devices else None,
                rate,
                late.get(sample.rank),
                sample.last_line,
            )
        )
    return found


def fold(ranks: Sequence[Row]) -> list[Row]:
    """Return a row for each host: sums of CPU and memory, the slowest rate, and the rank that is latest."""
    hosts: dict[str, list[Row]] = {}
    for row in ranks:
        hosts.setdefault(row.host, []).append(row)
    found = []
    for host, ours in hosts.items():
        states = Counter(row.state for row in ours)
        mixed = ", ".join(f"{count} {state}" for state, count in states.items())
        busy = [row.gpu_busy for row in ours if row.gpu_busy is not None]
        memory = [row.gpu_bytes for row in ours if row.gpu_bytes is not None]
        cpus = [row.cpu for row in ours if row.cpu is not None]
        found.append(
            Row(
                tuple(rank for row in ours for rank in row.ranks),
                host,
                ours[0].pid if len(ours) == 1 else None,
                ours[0].state if len(states) == 1 else mixed,
                sum(cpus) if cpus else None,
                sum(row.rss_bytes for row in ours),
                sum(memory) if memory else None,
                sum(busy) / len(busy) if busy else None,
                min((row.rate for row in ours if row.rate is not None), default=None),
                max((row.late for row in ours if row.late is not None), default=None),
                next((row.line for row in ours if row.line), ""),
            )
        )
    return found


def render(table: Sequence[Row], width: int) -> list[str]:
    """Return the head of the table and a line for each row, none longer than ``width`` characters.

    The column of GPUs is left out where no rank has one, and the last line of a rank takes what is left.
    """
    head = ["RANK", "HOST", "PID", "STATE", "CPU", "RSS", "GPU", "COLL/S", "LATE"]
    body = [_cells(row) for row in table]
    if not any(row.gpu_bytes is not None for row in table):
        at = head.index("GPU")
        head, body = [*head[:at], *head[at + 1 :]], [[*cells[:at], *cells[at + 1 :]] for cells in body]
    widths = [max(len(cells[column]) for cells in [head, *body]) for column in range(len(head))]
    left = {head.index("HOST"), head.index("STATE")}

    def show(cells: Sequence[str], line: str) -> str:
        aligned = (
            cell.ljust(size) if at in left else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(cells, widths, strict=True))
        )
        return f"{_GAP.join(aligned)}{_GAP}{line}"[:width].rstrip()

    return [show(head, "LAST LINE"), *(show(cells, one_line(row.line)) for cells, row in zip(body, table, strict=True))]


def show_bytes(count: int) -> str:
    """Return a size in at most five characters: ``512K``, ``1.5G``."""
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < 999.5:
            return f"{value:.0f}{unit}" if value >= 9.95 or unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"


def show_seconds(seconds: float) -> str:
    """Return a duration in at most five characters: ``0.25s``, ``12s``, ``14m``, ``3h``."""
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 99.5:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 99.5 * 60 else f"{seconds / 3600:.0f}h"


def _late(samples: Sequence[RankSample]) -> dict[int, float]:
    """Return for how long other ranks have waited in a collective for each rank that has not called it."""
    waits: dict[tuple[str, str], dict[int, float]] = {}
    for sample in samples:
        for group in sample.groups:
            if group.waiting is not None and group.waiting.called:
                longest = waits.setdefault((group.name, group.ranks), {})
                waited = max(0.0, sample.time - group.waiting.called)
                longest[group.waiting.number] = max(longest.get(group.waiting.number, 0.0), waited)
    found: dict[int, float] = {}
    for sample in samples:
        for group in sample.groups:  # ranks of a group wait in few different collectives
            for number, waited in waits.get((group.name, group.ranks), {}).items():
                if number > group.enqueued:
                    found[sample.rank] = max(found.get(sample.rank, 0.0), waited)
    return found


def _cells(row: Row) -> list[str]:
    ranks = rank_ranges(row.ranks).partition(" ")[2]
    ranks = ranks if len(ranks) <= _RANKS_WIDTH else f"{ranks[: _RANKS_WIDTH - 1]}…"
    busy = "" if row.gpu_busy is None else f"{row.gpu_busy:.0%} "
    return [
        ranks,
        one_line(row.host)[-_HOST_WIDTH:],
        "" if row.pid is None else str(row.pid),
        {"uninterruptible": "disk wait"}.get(row.state, row.state),
        "" if row.cpu is None else f"{row.cpu:.0%}",
        show_bytes(row.rss_bytes),
        "" if row.gpu_bytes is None else busy + show_bytes(row.gpu_bytes),
        "" if row.rate is None else f"{row.rate:.1f}" if row.rate < 99.95 else f"{row.rate:.0f}",
        "" if row.late is None else show_seconds(row.late),
    ]
