# SPDX-License-Identifier: BSD-3-Clause
"""What a job has done with its time, over restarts and requeues; no figure that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest

from torchx_monarch.backends.core.snapshot import AppSnapshot, RoleSnapshot
from torchx_monarch.insight.account import Account, build
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.rank_sample import Progress
from torchx_monarch.insight.timeline import build as build_timeline
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.schedulers.job_status import account_of

ROLE = [RoleSpec("t", workload=WorkloadKind.RANKS)]


def event(time: float, kind: str, **fields: Any) -> Event:
    return {"time": time, "kind": kind, "message": kind, **fields}


def steps(first: int, last: int, began: float, ended: float, **more: Any) -> dict[str, Any]:
    return {"first": first, "last": last, "began": began, "ended": ended, "checkpoint": None, "saved": None, **more}


HOSTS = [{"replica": 0, "name": "a", "first_rank": 0, "pids": [7], "imported": [12.0, 16.0]}]

START = [
    event(0, "submitted", seconds=0.0),
    event(10, "job_started"),
    event(11, "hosts"),
    event(20, "ranks", attempt=0, hosts=HOSTS),
]
#: The first attempt has done steps 0 to 9, saved at step 4; the second begins with step 5.
RESTARTED = [
    *START,
    event(40, "failure"),
    event(41, "attempt_end", attempt=0, steps=steps(0, 9, 30.0, 40.0, checkpoint=4, saved=35.5)),
    event(41, "rank_restart", attempt=1),
    event(42, "ranks", attempt=1, hosts=HOSTS),
]
SUCCEEDED = [
    *RESTARTED,
    event(80, "attempt_end", attempt=1, steps=steps(5, 24, 50.0, 70.0)),
    event(80, "result", code=0),
    event(80, "ended"),
]


def account(happened: list[Event], present: Progress | None = None, end: float = 80.0, failed: bool = False) -> Account:
    timeline = build_timeline(happened, ROLE, end=end)
    found = build(timeline, "t", present, has_failed=failed)
    assert found is not None
    if found.goodput is not None:
        new = found.goodput * (timeline.job.seconds - found.lost.get("waiting", 0.0))
        assert new + sum(found.lost.values()) == pytest.approx(timeline.job.seconds), "the causes add up"
    return found


def test_a_restart() -> None:
    found = account(SUCCEEDED)
    assert (found.steps, found.redone, list(found.since_checkpoint)) == (25, 5, [4.5])
    lost = {"waiting": 10.0, "start": 16.0, "imports": 4.0, "restart": 10.0, "redone": 5.0, "end": 10.0}
    assert found.lost == pytest.approx(lost) and found.goodput == pytest.approx(25 / 70)


def test_a_hang_is_not_training() -> None:
    found = account([*SUCCEEDED[:-3], event(65, "hang", waited=3.0), event(66, "hang_end"), *SUCCEEDED[-3:]])
    assert found.lost["hang"] == pytest.approx(4.0) and found.goodput == pytest.approx(21 / 70)


def test_a_requeue_waits_again() -> None:
    requeued = [
        *START,
        event(40, "attempt_end", attempt=0, steps=steps(0, 9, 30.0, 40.0, checkpoint=9, saved=40.0)),
        event(40, "requeue"),
        event(60, "job_started"),
        event(61, "hosts"),
        event(62, "ranks", attempt=0),
        event(80, "attempt_end", attempt=0, steps=steps(10, 19, 70.0, 80.0)),
        event(80, "ended"),
    ]
    found = account(requeued)
    assert (found.steps, found.redone, list(found.since_checkpoint)) == (20, 0, [0.0])
    assert found.lost == pytest.approx({"waiting": 30.0, "start": 16.0, "imports": 4.0, "restart": 10.0})
    assert account(requeued, failed=True).since_checkpoint == [0.0, None]


def test_a_job_that_runs() -> None:
    present = Progress(14, None, 60.0, first_step=5, first_time=50.0)
    found = account(RESTARTED, present, end=60.0)
    assert (found.steps, found.redone) == (15, 5) and found.goodput == pytest.approx(15 / 50)
    unknown = account(RESTARTED, end=60.0)
    assert (unknown.steps, unknown.redone, unknown.goodput) == (None, None, None)


@pytest.mark.parametrize("end", [[], [event(80, "attempt_end", attempt=1)]], ids=["lost", "without steps"])
def test_no_figure_that_is_not_known(end: list[Event]) -> None:
    """Of programs that tell no steps, what events say; an attempt whose end nobody recorded may have done anything."""
    found = account([*RESTARTED[:-1], event(42, "ranks", attempt=1), *end, event(80, "ended")])
    assert (found.steps is None) == (not end)
    no_steps = [{name: value for name, value in event.items() if name != "steps"} for event in SUCCEEDED]
    found = account(no_steps)
    assert found == Account(None, None, (), found.lost, None)
    assert found.lost == pytest.approx({"waiting": 10.0, "start": 6.0, "imports": 4.0, "restart": 2.0})


@pytest.mark.parametrize("wrong", [7, {"first": "x"}, steps(9, 3, 50.0, 40.0), steps(3, 9, -1e10, 9e10)], ids=str)
def test_what_ranks_write_does_no_harm(wrong: Any) -> None:
    happened = [{**event, "steps": wrong} if event["kind"] == "attempt_end" else event for event in SUCCEEDED]
    found = build(build_timeline(happened, ROLE, end=80.0), "t")
    assert found is not None and (found.goodput is None or 0 <= found.goodput <= 1)


def test_an_allocation_and_a_job_that_waits_have_none() -> None:
    assert build(build_timeline(START[:2], ROLE, end=80.0), "t") is None
    run = [*START[:3], event(15, "run", run=1), event(20, "ranks", attempt=0), event(30, "run_end", run=1)]
    for spec, has in ((RoleSpec("t", workload=WorkloadKind.ALLOCATION), False), (RoleSpec("t", allocation="h"), True)):
        app = AppSnapshot("id", "t", [RoleSnapshot(spec, [])])
        assert (account_of(app, build_timeline(run, [spec], end=80.0)) is not None) == has
