# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch top``: a job and its ranks on one screen, again and again."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchx_monarch.cli.arguments import add_hosts, seconds
from torchx_monarch.cli.jobs import SAMPLE_PAUSE_S, JobFacts, opened_job
from torchx_monarch.cli.output import Screen, print_record
from torchx_monarch.cli.status import account_facts, headline, trend_lines
from torchx_monarch.insight.log_lines import is_terminal
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.insight.stacks import ranges
from torchx_monarch.insight.summary import show_duration, show_restarts
from torchx_monarch.schedulers import job_status
from torchx_monarch.system.untrusted_text import one_line

_NO_TERMINAL_WIDTH = 160
"""Columns of the lines where there is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hosts(parser)
    parser.add_argument(
        "--interval",
        type=seconds(0.01, 86400),
        default=2.0,
        metavar="SECONDS",
        help="time between two looks (default: 2)",
    )
    parser.add_argument("--once", action="store_true", help="print it once, with all ranks")
    parser.add_argument("--by-host", action="store_true", help="a line for each host instead of each rank")


def to_json(facts: JobFacts) -> dict[str, object]:
    return {"status": facts.status.to_json(), "missing": dict(facts.missing), "problem": facts.problem}


def run(args: argparse.Namespace) -> None:
    screen = Screen()
    with opened_job(args.handle, args.role, args.address) as job:
        once = [job.read(min(SAMPLE_PAUSE_S, args.interval))] if args.once else None
        for facts in once or job.watch(args.interval, 0.0):
            width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else _NO_TERMINAL_WIDTH
            if args.json:
                print_record(to_json(facts))
            elif once or not is_terminal(sys.stdout):
                print("\n".join(lines(facts, width, args.by_host)), end="\n\n", flush=True)
            else:
                screen.show(lines(facts, width, args.by_host), whole=facts.status.has_ended)


# -- as lines ----------------------------------------------------------------------------------------------------------


def head(facts: JobFacts, width: int) -> list[str]:
    """Return the lines above the table: the job, what it does, and what is wrong."""
    status = facts.status
    parts = [job_status.in_one_line(status), show_restarts(status.restarts) if status.restarts else ""]
    found = [headline(status), *textwrap.wrap(one_line("; ".join(filter(None, parts))), width, break_on_hyphens=False)]
    found += trend_lines(status)
    found += [f"{title}: {text}" for title, text in account_facts(status.account)]
    found += [one_line(f"host {replica}: {why}") for replica, why in facts.missing.items()]
    found += [one_line(facts.problem)] if facts.problem else []
    return [line[:width] for line in found]


def lines(facts: JobFacts, width: int, by_host: bool = False) -> list[str]:
    """Return all lines, none longer than ``width`` characters."""
    return head(facts, width) + (rank_table(ranks, width, by_host) if (ranks := facts.status.activity) else [])


# -- the table of ranks ------------------------------------------------------------------------------------------------

_HOST_WIDTH = 12
"""The most characters of a host's name that are shown; the end of longer names, which tells hosts apart."""

_RANKS_WIDTH = 11
"""The most characters of the numbers of a host's ranks."""

_GAP = "  "

_HEAD = ("RANK", "HOST", "PID", "STATE", "CPU", "RSS", "GPU", "COLL/S", "LATE")
_LEFT_ALIGNED = ("HOST", "STATE")


def rank_table(ranks: Sequence[RankView], width: int, by_host: bool = False) -> list[str]:
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
    texts = ["LAST LINE"]
    texts += [next((rank.last_line for rank in group if rank.last_line), "") for group in groups.values()]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]

    def line(row: Sequence[str], text: str) -> str:
        cells = [
            row[at].ljust(widths[at]) if _HEAD[at] in _LEFT_ALIGNED else row[at].rjust(widths[at]) for at in columns
        ]
        return _GAP.join([*cells, one_line(text)])[:width].rstrip()

    return [line(row, text) for row, text in zip(rows, texts, strict=True)]


def _cells(ranks: Sequence[RankView]) -> tuple[str, ...]:
    numbers = ranges([rank.rank for rank in ranks])
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
        show_duration(max(waits)) if waits else "",
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
