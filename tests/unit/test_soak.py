# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""That the soak (see ``tests/soak``) would see what it looks for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

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


def check(folder: Path, lines: list[str], replica: int = 1) -> list[str]:
    log = printed.Log("the log", replica, ("out",), "".join(f"{one}\n" for one in lines))
    return printed.check(folder, folder / "events", [log])


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


def test_a_line_in_another_replicas_log(folder: Path) -> None:
    events.append(folder / "events", "replica_exited", "", replica=1, exit_code=0)
    assert check(folder, LINES[:1], replica=0)


def test_what_a_killed_host_has_not_read_is_not_in_its_log(folder: Path) -> None:
    events.append(folder / "events", "replica_exited", "", replica=1, exit_code=-9)
    assert check(folder, LINES[:5]) == []
    assert check(folder, [*LINES[:5], *LINES[6:]])


@pytest.mark.parametrize(
    ("faults", "plan", "expected"),
    [
        ([("kill", "host", 0)], {}, False),
        ([("kill", "host", 0)], {"retries": 1}, True),
        ([("kill", "host", 0)], {"hosts": 2, "restarts": 1}, False),
        ([("kill", "host", 1)], {"hosts": 2, "fewest": 1}, True),
        ([("freeze", "agent", 1), ("term", "host", 1)], {"hosts": 2, "fewest": 1}, True),
        ([("kill", "host", 1), ("kill", "host", 2)], {"hosts": 3, "fewest": 2}, False),
        ([("kill", "rank", 0)], {"restarts": 1}, True),
        ([("kill", "rank", 0)], {"restarts": 1, "fails": True}, False),
        ([("kill", "rank", 0), ("kill", "host", 0)], {"restarts": 1, "retries": 1}, False),
        ([("kill", "supervisor", -1)], {"retries": 2}, False),
        ([("kill", "keeper", -1), ("stop", "host", 0), ("kill", "submitter", -1)], {}, True),
    ],
)
def test_which_jobs_go_on(faults: list[tuple[str, str, int]], plan: dict[str, Any], expected: bool) -> None:
    moment = plans.Moment("run", (), 0.0)
    injections = [
        Injection(plans.Fault(action, target, moment, 0.0, 0.0), 0.0, PID, replica)
        for action, target, replica in faults
    ]
    fixed: dict[str, Any] = {"hosts": 1, "fewest": plan.get("hosts", 1), "restarts": 0, "retries": 0, "fails": False}
    assert expectations.goes_on(dataclasses.replace(plans.draw(1, 0), **{**fixed, **plan}), injections) is expected


def test_plans_cover_every_fault_at_every_moment() -> None:
    pending_progress = [fault for number in range(3000) for fault in plans.draw(1, number).faults]
    signals = {"kill", "term", "stop", "freeze"}
    found = {(one.action, one.target, one.moment.phase) for one in pending_progress if one.action in signals}
    targets = ("submitter", "keeper", "supervisor", "host", "agent", "rank")
    phases = (*plans.PHASES, "with")
    wanted = {(action, target, phase) for action in signals for target in targets for phase in phases}
    assert wanted <= found


def test_the_same_number_is_the_same_job() -> None:
    assert plans.draw(7, 3) == plans.draw(7, 3) != dataclasses.replace(plans.draw(7, 4), number=3)
