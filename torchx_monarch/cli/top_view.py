# SPDX-License-Identifier: BSD-3-Clause
"""What ``torchx monarch top`` shows of a job at one moment, as lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torchx_monarch.insight.rank_table import Row, fold, render
from torchx_monarch.insight.summary import show_duration, show_restarts
from torchx_monarch.schedulers.job_status import PHASES, JobStatus
from torchx_monarch.system.untrusted_text import one_line

_KEYS = "q quit   up/down/pgup/pgdn scroll   h {}"


@dataclasses.dataclass(frozen=True)
class View:
    """A job and its ranks at one moment.

    Attributes:
        status: status of the job.
        ranks: a row for each rank.
        missing: why a host has not answered, by replica.
        problem: why there is no row at all; empty if the hosts have answered.
    """

    status: JobStatus
    ranks: Sequence[Row]
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problem: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the view as JSON values."""
        return {
            "status": self.status.to_json(),
            "ranks": [row.to_json() for row in self.ranks],
            "missing": dict(self.missing),
            "problem": self.problem,
        }


def head(view: View) -> list[str]:
    """Return the lines above the table: the job, what it does, and what is wrong."""
    status = view.status
    word = "after" if status.has_ended else "for"
    took = "" if status.elapsed is None else f" {word} {show_duration(status.elapsed)}"
    facts = [
        "" if status.phase is None else PHASES[status.phase],
        "" if status.attempt is None else f"attempt {status.attempt} of {status.attempts or '?'}",
        show_restarts(status.restarts) if status.restarts else "",
    ]
    if status.ranks is not None and status.hosts is not None:
        facts.append(f"{status.ranks} ranks on {status.hosts} host{'s' if status.hosts > 1 else ''}")
    if status.spares:
        facts.append(f"spare: {', '.join(status.spares)}")
    lines = [f"{one_line(status.handle)}: {status.state}{took}", "; ".join(filter(None, facts)), status.message]
    if status.hang is not None and not status.has_ended:
        lines.append(f"hang: {status.hang.message}")
    if status.last_failure is not None and not status.has_ended:
        lines.append(f"last failure: {status.last_failure.message}")
    lines += [exclusion.message for exclusion in status.excluded]
    lines += [f"host {replica}: {why}" for replica, why in view.missing.items()]
    lines.append("" if status.has_ended else view.problem)
    return [one_line(line) for line in lines if line]


def show(view: View, width: int, by_host: bool = False) -> list[str]:
    """Return all lines, none longer than ``width`` characters."""
    table = render(fold(view.ranks) if by_host else view.ranks, width) if view.ranks else []
    return [line[:width] for line in head(view)] + table


def screen(view: View, width: int, height: int, first: int, by_host: bool = False) -> tuple[list[str], int]:
    """Return the lines of a terminal, and the first row that is shown.

    Args:
        first: the first row of the table to show; a number that is too large shows the end of the table.
        by_host: whether there is one row for each host.
    """
    above = [line[:width] for line in head(view)][: max(1, height - 4)]
    table = render(fold(view.ranks) if by_host else view.ranks, width) if view.ranks else [""]
    room = max(1, height - len(above) - 3)
    count = len(table) - 1
    first = max(0, min(first, count - room))
    shown = table[1 + first : 1 + first + room]
    keys = _KEYS.format("by rank" if by_host else "by host")
    if count > room:
        keys = f"{keys}   {first + 1}-{first + len(shown)} of {count}"
    body = [*above, "", table[0], *shown]
    return [*body, *[""] * (height - 1 - len(body)), keys[:width]], first
