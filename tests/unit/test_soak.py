# SPDX-License-Identifier: BSD-3-Clause
"""That the soak (see ``tests/soak``) would see what it looks for."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState

from tests.soak import expectations, plans, printed
from tests.soak.faults import Injection
from tests.soak.program import line
from torchx_monarch.insight import events

HOST, PID = 100, 200
LINES = [f"[default0]:{line('out', 0, PID, number)}" for number in range(10)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The proofs of one rank that has printed ten lines, and the events of its app."""
    (tmp_path / f"begin-0-{PID}").write_text(json.dumps({"pid": PID, "host": HOST}))
    (tmp_path / f"out-0-{PID}").write_text("".join(f"{number}\n" for number in range(len(LINES))))
    events.append(tmp_path / "events", "replica_started", "", replica=1, pid=HOST)
    return tmp_path


def check(folder: Path, lines: list[str]) -> list[str]:
    log = printed.Log("the log", 1, ("out",), "".join(f"{line}\n" for line in lines))
    return printed.check(folder, *printed.host_starts(folder / "events"), [log])


@pytest.mark.parametrize("exit_code", [0, 1, -9])
def test_a_log_with_all_lines(folder: Path, exit_code: int) -> None:
    events.append(folder / "events", "replica_exited", "", replica=1, exit_code=exit_code)
    assert check(folder, [*LINES, "[monarch] ranks 1/1 (0.10 s)"]) == []


@pytest.mark.parametrize(
    "lines",
    [
        LINES[:-1],
        LINES[1:],
        [*LINES, LINES[-1]],
        [LINES[1], LINES[0], *LINES[2:]],
        [*LINES[:7], LINES[7][:50], LINES[7][50:], *LINES[8:]],
        [LINES[0] + LINES[1], *LINES[2:]],
    ],
    ids=["without the last", "without the first", "one twice", "not in order", "one in two pieces", "two in one"],
)
def test_a_log_that_is_not_as_printed(folder: Path, lines: list[str]) -> None:
    events.append(folder / "events", "replica_exited", "", replica=1, exit_code=1)
    assert check(folder, lines)


def test_what_a_killed_host_has_not_read_is_not_in_its_log(folder: Path) -> None:
    events.append(folder / "events", "replica_exited", "", replica=1, exit_code=-9)
    assert check(folder, LINES[:5]) == []
    assert check(folder, [*LINES[:5], *LINES[6:]])


def _plan(**changes: Any) -> plans.Plan:
    fixed: dict[str, Any] = {"hosts": 1, "spares": 0, "restarts": 0, "retries": 0, "policy": "ROLE", "fails": False}
    fixed["fewest"] = changes.get("hosts", 1)
    return dataclasses.replace(plans.draw(1, 0), **{**fixed, **changes})


def _injections(*hit: tuple[str, str, int]) -> list[Injection]:
    moment = plans.Moment("run", (), 0.0)
    return [
        Injection(plans.Fault(action, target, moment, 0.0, 0.0), 0.0, PID, replica) for action, target, replica in hit
    ]


class _Job:
    """What ``expectations.of_the_end`` asks of a job."""

    def __init__(self, plan: plans.Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder


DEAD = "the supervisor"
HOST_1 = f"replica r/0 (pid 7) exited with code 1: host 1 (vm, pid {PID})"
RANK = f"rank 0 (local rank 0 on vm, pid {PID}) was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("hit", "plan", "message", "right"),
    [
        ([("kill", "host", 1)], {}, f"{HOST_1} does not answer: no message from it for 10 s (lease)", False),
        ([("freeze", "host", 1)], {}, f"{HOST_1} does not answer: no message from it for 10 s (lease)", True),
        ([("kill", "rank", 0)], {}, RANK, True),
        ([("kill", "rank", 0)], {}, "cannot start rank 3: it was killed before it had begun", False),
        ([("kill", "supervisor", -1)], {}, f"{DEAD} (pid {PID}) has ended without a result: it was killed, or x", True),
        ([("kill", "supervisor", -1)], {}, f"{DEAD} (pid 9) has ended without a result: it was killed, or x", False),
        ([("kill", "host", 0)], {"fails": True, "restarts": 1}, "rank 0 exited with code 3", False),
        ([("kill", "rank", 0)], {"fails": True, "restarts": 1}, "rank 0 exited with code 3", True),
        ([("freeze", "rank", 0)], {}, "host 0 (vm, pid 7) does not answer", False),
    ],
)
def test_which_causes_are_true(
    tmp_path: Path, hit: list[tuple[str, str, int]], plan: dict[str, Any], message: str, right: bool
) -> None:
    (tmp_path / f"begin-0-{PID}").touch()
    job: Any = _Job(_plan(**plan), tmp_path)
    wrong = expectations.of_the_end(job, _injections(*hit), AppState.FAILED, message, rescued=False)
    assert (wrong == []) is right, wrong


@pytest.mark.parametrize(("spares", "most"), [(0, 2), (1, 3)])
def test_how_often_a_job_may_have_been_restarted(tmp_path: Path, spares: int, most: int) -> None:
    """After a failure of its own, and SIGTERM to a host: whose place a spare one takes before it is started again."""
    (tmp_path / "failed").touch()
    job: Any = _Job(_plan(hosts=2, spares=spares, retries=1, restarts=1, fails=True), tmp_path)
    wrong = [
        expectations._of_the_restarts(job, _injections(("term", "host", 1)), AppState.SUCCEEDED, most + more)
        for more in (0, 1)
    ]
    assert wrong == [[], [f"{most + 1} restarts, and there was something to restart after {most} times"]]


def test_a_soak_contains_every_fault_at_every_moment_in_every_kind_of_job() -> None:
    for seed in (1, 2):
        drawn = [plans.draw(seed, number) for number in range(len(plans.cells(1)))]
        single = {(kind, *what) for kind, [what, *more] in plans.cells(seed) if not more}
        assert single >= set(product(plans.KINDS, plans.SIGNALS, plans.TARGETS, plans.PHASES))
        for cell, plan in zip(plans.cells(seed), drawn, strict=True):
            assert [(fault.action, fault.target, fault.moment.phase) for fault in plan.faults] == list(cell.faults)
            assert cell.kind != "elastic" or plan.elastic
            assert cell.kind != "replaced" or (plan.policy == "REPLICA" and plan.retries and not plan.elastic)
        pairs = {frozenset(fault.target for fault in plan.faults) for plan in drawn if len(plan.faults) == 2}
        assert pairs == {frozenset(pair) for pair in product(plans.TARGETS, plans.TARGETS)}
        together = {fault.what for plan in drawn for fault in plan.faults if fault.moment.phase == "with"}
        assert together == {f"{action} {target}" for action, target in product(plans.SIGNALS, plans.TARGETS)}
        assert any(plan.spares for plan in drawn) and any(plan.fresh for plan in drawn)
