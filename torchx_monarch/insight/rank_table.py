# SPDX-License-Identifier: BSD-3-Clause
"""A table of ranks for people: a line for each rank or for each host, cut to the width of a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchx_monarch.insight.rank_view import RankView
from torchx_monarch.insight.stacks import rank_ranges
from torchx_monarch.system.untrusted_text import one_line

_HOST_WIDTH = 12
"""The most characters of a host's name that are shown; the end of longer names, which tells hosts apart."""

_RANKS_WIDTH = 11
"""The most characters of the numbers of a host's ranks."""

_GAP = "  "

_HEAD = ("RANK", "HOST", "PID", "STATE", "CPU", "RSS", "GPU", "COLL/S", "LATE")
_LEFT_ALIGNED = ("HOST", "STATE")


def render(ranks: Sequence[RankView], width: int, by_host: bool = False) -> list[str]:
    """Return the head of the table and a line for each row, none longer than ``width`` characters.

    The column of GPUs is left out where no rank has one, and the last line of a rank takes what is left.

    Args:
        by_host: whether the ranks of a host share a row: with the sums of CPU and memory, the slowest rate, and the
            time of the rank that others wait for longest.
    """
    groups: dict[object, list[RankView]] = {}
    for rank in ranks:
        groups.setdefault(rank.host if by_host else (rank.rank, rank.pid), []).append(rank)
    columns = [at for at, name in enumerate(_HEAD) if name != "GPU" or any(rank.devices for rank in ranks)]
    rows = [_HEAD, *map(_cells, groups.values())]
    texts = [
        "LAST LINE",
        *(next((rank.last_line for rank in group if rank.last_line), "") for group in groups.values()),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]

    def line(row: Sequence[str], text: str) -> str:
        cells = [
            row[at].ljust(widths[at]) if _HEAD[at] in _LEFT_ALIGNED else row[at].rjust(widths[at]) for at in columns
        ]
        return _GAP.join([*cells, one_line(text)])[:width].rstrip()

    return [line(row, text) for row, text in zip(rows, texts, strict=True)]


def _cells(ranks: Sequence[RankView]) -> tuple[str, ...]:
    numbers = rank_ranges([rank.rank for rank in ranks]).partition(" ")[2]
    states = Counter({"uninterruptible": "disk wait"}.get(rank.state, rank.state) for rank in ranks)
    cpus, rates, waits = (_values(ranks, name) for name in ("cpu", "collectives_per_second", "waited_for"))
    memory, busy = _values(ranks, "gpu_bytes"), _values(ranks, "gpu_busy")
    return (
        numbers if len(numbers) <= _RANKS_WIDTH else f"{numbers[: _RANKS_WIDTH - 1]}…",
        one_line(ranks[0].host)[-_HOST_WIDTH:],
        str(ranks[0].pid) if len(ranks) == 1 else "",
        next(iter(states)) if len(states) == 1 else ", ".join(f"{count} {state}" for state, count in states.items()),
        f"{sum(cpus):.0%}" if cpus else "",
        show_bytes(sum(rank.rss_bytes for rank in ranks)),
        f"{sum(busy) / len(busy):.0%} {show_bytes(sum(memory))}" if memory else "",
        f"{min(rates):.{1 if min(rates) < 99.95 else 0}f}" if rates else "",
        show_seconds(max(waits)) if waits else "",
    )


def _values(ranks: Sequence[RankView], name: str) -> list[Any]:
    return [value for rank in ranks if (value := getattr(rank, name)) is not None]


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
