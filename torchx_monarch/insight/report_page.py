# SPDX-License-Identifier: BSD-3-Clause
"""Write the report of a job: one HTML page that loads nothing, from values that the template escapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined

from torchx_monarch.insight.report_picture import Curve, Picture, Share
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.insight.timeline import PHASES, Moment, Span

_STYLES = [*(phase.replace(" ", "-") for phase in PHASES), "import", "attempt", "failed", "stopped"]


@dataclasses.dataclass(frozen=True)
class RoleTimes:
    """Where the time of a role went: its name, the time lost by cause in words, and its phases."""

    name: str
    lost: str
    shares: Sequence[Share]


@dataclasses.dataclass(frozen=True)
class Page:
    """What the page shows. Texts may be of any content; lists that are empty have no section.

    Attributes:
        name: name of the job.
        handle: its handle.
        state: its state in one word.
        headline: its state and how long it took.
        cause: why it ended; empty if there is nothing to say.
        traceback: the traceback of the root cause; empty without one.
        log: path of the log of the root cause; empty without one, or if this machine does not have it.
        facts: what ran: titles and texts.
        start: when it was submitted, in seconds since the epoch.
        picture: the picture of its timeline.
        is_from_log: whether the timeline is made of the lines of the log.
        roles: where the time of each role went.
        runs: the runs of a live allocation.
        curves: what ranks used, for each role its name and its curves.
        moments: failures, restarts and other changes.
        ranks: the ranks of the last attempt.
        ranks_left_out: how many more there are.
        stacks: files with stacks: their names and texts.
        written: the time for people.
    """

    name: str
    handle: str
    state: str
    headline: str
    cause: str
    traceback: str
    log: str
    facts: Sequence[tuple[str, str]]
    start: float
    picture: Picture
    is_from_log: bool
    roles: Sequence[RoleTimes]
    runs: Sequence[Span]
    curves: Sequence[tuple[str, Sequence[Curve]]]
    moments: Sequence[Moment]
    ranks: Sequence[Span]
    ranks_left_out: int
    stacks: Sequence[tuple[str, str]]
    written: str

    @property
    def styles(self) -> Sequence[str]:
        """The names of the colours."""
        return _STYLES


def render(page: Page) -> str:
    """Return the HTML of a page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = show_duration
    environment.filters["since"] = lambda time: show_duration(time - page.start)
    source = resources.files("torchx_monarch.insight").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page)
