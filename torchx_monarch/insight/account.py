# SPDX-License-Identifier: BSD-3-Clause
"""The account of a job: which steps its role of ranks has done and done again, and where the time of its hosts went.

It adds up all attempts, also after restarts, retries and requeues. A figure that is not known is None.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchx_monarch.insight.rank_sample import Progress, steps_done
from torchx_monarch.insight.timeline import Timeline

Times = tuple[float, float]
"""A start and an end, in seconds since the epoch."""

_RUNNING = ("running", "first output", "hang")
"""The phases in which the program of an attempt runs."""

_CAUSES = {"submit": "waiting", "queued": "waiting", "hang": "hang", "unknown": "unknown"}
"""The phases whose time has a cause of its own."""

CAUSES = ("waiting", "start", "imports", "hang", "restart", "redone", "end", "unknown")
"""Why no new steps were done. ``waiting``: in a queue. ``imports``: while a host imported torch. ``start`` and
``restart``: from there, or from a failure, until the first step of an attempt. ``redone``: in steps that an attempt
before had done. ``end``: after the last step. ``unknown``: this machine does not see what happened."""


@dataclasses.dataclass(frozen=True)
class Account:
    """The account of a role.

    Attributes:
        steps: how many steps are done, each counted once.
        redone: how many steps were done again.
        since_checkpoint: for each attempt with steps that has failed, the seconds from its last checkpoint to its end;
            None if it has completed none.
        lost: seconds without new steps, by cause (``CAUSES``); only those that are not 0.
        goodput: the share of the time of its hosts in which new steps were done, 0 to 1.
    """

    steps: int | None
    redone: int | None
    since_checkpoint: Sequence[float | None]
    lost: Mapping[str, float]
    goodput: float | None


def build(
    timeline: Timeline, role: str, present: Progress | None = None, *, has_failed: bool = False
) -> Account | None:
    """Return the account of a role of ranks; None if none have run.

    Args:
        present: what a rank of the present attempt has reported.
        has_failed: whether the role has ended, and not with success.
    """
    running = [phase for phase in timeline.spans_of("phase", role) if phase.name in _RUNNING]
    ran = {id(phase.parent) for phase in running}
    attempts = [attempt for attempt in timeline.spans_of("attempt", role) if id(attempt) in ran]
    if not attempts:
        return None
    done = [attempt.steps for attempt in attempts]
    last = attempts[-1]
    if present is not None and not last.is_recorded:
        done[-1] = steps_done(present, last.start, timeline.job.end)
    known = [steps for steps in done if steps is not None]
    # An attempt whose end is not recorded may have done any steps.
    if not known or any(steps is None and not span.is_recorded for steps, span in zip(done, attempts, strict=True)):
        spent = _spent(timeline, role, [(phase.start, phase.end) for phase in running])
        return Account(None, None, (), _shown(spent), None)
    spent = _spent(timeline, role, [(steps.began, steps.ended) for steps in known])
    redone, furthest = 0, known[0].first - 1
    for steps in known:
        again = max(0, min(steps.last, furthest) - steps.first + 1)
        redone, furthest = redone + again, max(furthest, steps.last)
        spent["redone"] += (steps.ended - steps.began) * again / (steps.last - steps.first + 1)
    hosts = timeline.job.seconds - spent["waiting"]
    failed = known if has_failed else [steps for steps in known if steps is not done[-1]]
    return Account(
        steps=furthest - known[0].first + 1,
        redone=redone,
        since_checkpoint=[None if steps.saved is None else max(0.0, steps.ended - steps.saved) for steps in failed],
        lost=_shown(spent),
        goodput=max(0.0, spent["new"] - spent["redone"]) / hosts if hosts > 0 else None,
    )


def _shown(spent: Mapping[str, float]) -> dict[str, float]:
    return {cause: spent[cause] for cause in CAUSES if spent[cause] > 0}


def _spent(timeline: Timeline, role: str, working: Iterable[Times]) -> dict[str, float]:
    """Return the seconds of the job by cause, and as ``new`` those in which ranks worked, at the times given."""
    working = _merged(working)
    edges = [timeline.job.start, *itertools.chain(*working), timeline.job.end]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    imports = _merged((span.start, span.end) for span in timeline.spans_of("import", role))
    spent = dict.fromkeys((*CAUSES, "new"), 0.0)
    for phase in timeline.spans_of("phase", role):
        if phase.name in _CAUSES:
            spent[_CAUSES[phase.name]] += phase.seconds
            continue
        spent["new"] += sum(end - start for _, start, end in _within(phase.start, phase.end, working))
        for place, start, end in _within(phase.start, phase.end, gaps):
            cause = "start" if not place else "end" if place == len(gaps) - 1 else "restart"
            importing = sum(last - first for _, first, last in _within(start, end, imports))
            spent["imports"] += importing
            spent[cause] += end - start - importing
    return spent


def _merged(times: Iterable[Times]) -> list[Times]:
    found: list[Times] = []
    for start, end in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _within(start: float, end: float, times: Sequence[Times]) -> Iterator[tuple[int, float, float]]:
    """Yield which of some times, in order, are at least partly between two times, and those parts of them."""
    for place in range(bisect.bisect_left(times, start, key=lambda time: time[1]), len(times)):
        first, last = max(start, times[place][0]), min(end, times[place][1])
        if first > end:
            return
        yield place, first, max(first, last)


def lost_seconds(timeline: Timeline, role: str) -> dict[str, float]:
    """Return the seconds in which the ranks of a role did not run, or hung, by cause.

    ``queue``: before the hosts started. ``launch``: from there until the first ranks ran. ``restart``: from each
    failure until the ranks ran again, or the job ended. ``hang``: while ranks waited for one of them.
    """
    lost = {"queue": 0.0, "launch": 0.0, "restart": 0.0, "hang": 0.0}
    cause = "launch"
    for span in timeline.spans_of("phase", role):
        if span.name in ("running", "first output"):
            cause = "restart"
        elif span.name in ("ready", "end"):
            cause = "launch"
        elif span.name == "hang":
            lost["hang"] += span.seconds
        elif span.name in ("submit", "queued") and cause == "launch":
            lost["queue"] += span.seconds
        elif span.name != "unknown":
            lost[cause] += span.seconds
    return lost
