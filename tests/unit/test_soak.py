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

from tests.soak import expectations, faults, plans, printed, runs
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
    return printed.check(folder, printed.HostStarts(folder / "events"), [log])


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
    ("killed", "unwatched", "complete"), [((), False, False), ((HOST,), False, True), ((), True, True)]
)
def test_a_host_whose_end_nobody_has_seen_was_killed_if_a_fault_explains_it(
    folder: Path, killed: tuple[int, ...], unwatched: bool, complete: bool
) -> None:
    starts = printed.HostStarts(folder / "events", killed, unwatched)
    log = printed.Log("the log", 1, ("out",), LINES[0])
    assert (printed.check(folder, starts, [log]) == []) is complete


def test_only_a_deleted_file_may_lack_lines(folder: Path) -> None:
    events.append(folder / "events", "replica_exited", "", replica=1, exit_code=0)
    log = printed.Log("the ranks' stdout.log", 1, ("out",), "", deleted=frozenset([("out", 0)]))
    starts = printed.HostStarts(folder / "events")
    assert printed.check(folder, starts, [log]) == []
    assert printed.check(folder, starts, [dataclasses.replace(log, deleted=frozenset([("err", 0), ("out", 1)]))])


def _plan(**changes: Any) -> plans.Plan:
    fixed: dict[str, Any] = {"hosts": 1, "spares": 0, "restarts": 0, "retries": 0, "policy": "ROLE", "fails": False}
    fixed["fewest"] = changes.get("hosts", 1)
    return dataclasses.replace(plans.draw(1, 0), **{**fixed, **changes})


def _injections(*hit: tuple[str, str, int]) -> list[Injection]:
    moment = plans.Moment("run", (), 0.0)
    return [
        Injection(plans.Fault(action, target, moment, 0.0, 0.0), 0.0, PID, replica) for action, target, replica in hit
    ]


@pytest.mark.parametrize(
    ("hit", "plan", "expected"),
    [
        ([("kill", "host", 0)], {}, False),
        ([("kill", "host", 0)], {"retries": 1}, True),
        ([("kill", "host", 0)], {"hosts": 2, "restarts": 1}, False),
        ([("kill", "host", 1)], {"hosts": 2, "fewest": 1}, True),
        ([("freeze", "host", 1), ("term", "host", 1)], {"hosts": 2, "fewest": 1}, True),
        ([("kill", "host", 1), ("kill", "host", 2)], {"hosts": 3, "fewest": 2}, False),
        ([("kill", "rank", 0)], {"restarts": 1}, True),
        ([("kill", "rank", 0)], {"restarts": 1, "fails": True}, False),
        ([("kill", "rank", 0), ("kill", "host", 0)], {"restarts": 1, "retries": 1}, False),
        ([("kill", "supervisor", -1)], {"retries": 2}, False),
        ([("kill", "keeper", -1), ("stop", "host", 0), ("kill", "submitter", -1)], {}, True),
        ([("kill", "host", 0)], {"hosts": 2, "fewest": 1}, False),
        ([("term", "host", 0)], {"hosts": 2, "spares": 1}, False),
        ([("kill", "host", 0)], {"hosts": 2, "spares": 1, "policy": "REPLICA", "retries": 1}, True),
        ([("kill", "host", 0), ("kill", "host", 1)], {"hosts": 3, "fewest": 2}, False),
    ],
)
def test_which_jobs_go_on(hit: list[tuple[str, str, int]], plan: dict[str, Any], expected: bool) -> None:
    assert expectations.goes_on(_plan(**plan), _injections(*hit)) is expected


class _Job:
    """What ``expectations.of_the_end`` asks of a job."""

    def __init__(self, plan: plans.Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder


HOST_1 = f"replica r/0 (pid 7) exited with code 1: host 1 (vm, pid {PID})"
RANK = f"rank 0 (local rank 0 on vm, pid {PID}) was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("hit", "plan", "message", "right"),
    [
        ([("kill", "host", 1)], {}, f"{HOST_1} does not answer: no message from it for 10 s (lease)", False),
        ([("freeze", "host", 1)], {}, f"{HOST_1} does not answer: no message from it for 10 s (lease)", True),
        ([("kill", "rank", 0)], {}, RANK, True),
        ([("kill", "rank", 0)], {}, "cannot start rank 3: it was killed before it had begun", False),
        ([("kill", "supervisor", -1)], {}, f"the supervisor (pid {PID}) was killed by signal 9 (SIGKILL)", True),
        ([("kill", "supervisor", -1)], {}, f"the supervisor (pid {PID}) and the keeper (pid 9) were killed", False),
        (
            [("kill", "supervisor", -1), ("kill", "keeper", -1)],
            {},
            f"the supervisor (pid {PID}) and the keeper (pid 9) were killed",
            True,
        ),
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


@pytest.mark.parametrize(
    ("hit", "state", "states", "right"),
    [
        ([], "SUCCEEDED", ["SUCCEEDED", "SUCCEEDED"], True),
        ([], "SUCCEEDED", ["SUCCEEDED"], False),
        ([], "SUCCEEDED", ["SUCCEEDED", "FAILED"], False),
        ([("kill", "host", 1)], "SUCCEEDED", ["SUCCEEDED", "FAILED"], True),
        ([("kill", "host", 0)], "SUCCEEDED", ["SUCCEEDED", "FAILED"], False),
        ([("kill", "host", 0), ("kill", "host", 1)], "SUCCEEDED", ["FAILED", "FAILED"], False),
        ([("cancel", "", -1)], "CANCELLED", ["CANCELLED", "SUCCEEDED"], True),
        ([("cancel", "", -1)], "CANCELLED", ["CANCELLED", "FAILED"], False),
        ([("kill", "host", 0)], "FAILED", ["FAILED", "CANCELLED"], True),
        ([("kill", "host", 0)], "FAILED", ["CANCELLED", "CANCELLED"], False),
        ([("kill", "host", 0)], "FAILED", ["FAILED", "RUNNING"], False),
    ],
)
def test_which_states_of_replicas_fit_that_of_the_app(
    hit: list[tuple[str, str, int]], state: str, states: list[str], right: bool
) -> None:
    found = expectations.of_the_replicas(
        _plan(hosts=2, fewest=1), _injections(*hit), AppState[state], dict(enumerate(states))
    )
    assert (found == "") is right, found


def test_a_soak_contains_every_fault_at_every_moment_in_every_kind_of_job() -> None:
    for seed in (1, 2):
        drawn = [plans.draw(seed, number) for number in range(len(plans.cells(1)))]
        single = {(kind, *what) for kind, [what, *more] in plans.cells(seed) if not more}
        assert single >= set(product(plans.KINDS, plans.SIGNALS, plans.TARGETS, plans.PHASES))
        for cell, plan in zip(plans.cells(seed), drawn, strict=True):
            assert [(one.action, one.target, one.moment.phase) for one in plan.faults] == list(cell.faults)
            assert cell.kind != "elastic" or plan.elastic
            assert cell.kind != "replaced" or (plan.policy == "REPLICA" and plan.retries and not plan.elastic)
        pairs = {frozenset(one.target for one in plan.faults) for plan in drawn if len(plan.faults) == 2}
        assert pairs == {frozenset(pair) for pair in product(plans.TARGETS, plans.TARGETS)}
        together = {one.what for plan in drawn for one in plan.faults if one.moment.phase == "with"}
        assert together == {f"{action} {target}" for action, target in product(plans.SIGNALS, plans.TARGETS)}
        assert any(plan.spares for plan in drawn) and any(plan.fresh for plan in drawn)


def test_a_job_that_is_told_to_end_does_not_end_by_itself_before() -> None:
    for plan in (plans.draw(1, number) for number in range(len(plans.cells(1)))):
        told = [one for one in plan.faults if one.tells or one.deletes]
        if len(plan.faults) == 1 and told:
            assert plan.awaits_end is (told[0].moment.phase != "end")


def test_a_fault_that_is_drawn_and_never_injected_is_an_error() -> None:
    [number] = [n for n in range(len(plans.cells(1))) if plans.cells(1)[n] == ("fixed", (("kill", "host", "run"),))]
    plan = plans.draw(1, number)
    missed, hit = runs.Outcome(plan), runs.Outcome(plan, injections=[Injection(plan.faults[0], 0.1)])
    assert runs.never_injected([missed] * 3)
    assert not runs.never_injected([missed, missed, hit])


@pytest.mark.parametrize(
    ("hit", "told"),
    [
        ([("term", "submitter", -1)], True),
        ([("term", "submitter", -1), ("freeze", "submitter", -1)], False),
        ([("term", "supervisor", -1), ("kill", "submitter", -1)], True),
        ([("kill", "host", 0)], False),
    ],
)
def test_a_submitter_that_is_gone_may_not_have_told_the_job_to_end(hit: list[tuple[str, str, int]], told: bool) -> None:
    assert runs.is_told(_injections(*hit)) is told


class _ShortJob:
    """A job that ends after some looks, with these events."""

    began, app_id = 0.0, "a"

    def __init__(self, events: set[str]) -> None:
        self._events, self._looks = events, 0

    def seen(self) -> set[str]:
        return self._events

    def wait(self, timeout: float) -> bool:
        self._looks += 1
        return self._looks > 3


@pytest.mark.parametrize(
    ("seen", "excused"), [([], False), (["ranks"], False), (["ranks", "rank_ended"], True)], ids=str
)
def test_a_fault_is_missed_without_its_process(monkeypatch: pytest.MonkeyPatch, seen: list[str], excused: bool) -> None:
    monkeypatch.setattr(faults, "targets", lambda job, kind: [])
    fault = plans.Fault("kill", "host", plans.Moment("run", ("ranks",), 0.0), 0.0, 0.0)
    job: Any = _ShortJob(set(seen))
    [miss] = faults.Injector(job).inject([fault])
    assert isinstance(miss, faults.Miss) and miss.excused is excused


def test_the_same_number_is_the_same_job() -> None:
    assert plans.draw(7, 3) == plans.draw(7, 3) != dataclasses.replace(plans.draw(7, 4), number=3)
