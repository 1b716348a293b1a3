# SPDX-License-Identifier: BSD-3-Clause
"""The state of an app: from its replicas, for all backends."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torchx.specs import AppDef, Role

from tests.waits import WITHIN
from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import AppStatus, count_restarts, pending_stop, reduce
from torchx_monarch.command.allocations import hold_for_runs
from torchx_monarch.command.rewrite import WrapOptions, rewrite
from torchx_monarch.components import controller
from torchx_monarch.model.role_spec import (
    RetryPolicy,
    RoleSpec,
    WorkloadKind,
    is_sidecar,
    mark_sidecar,
)
from torchx_monarch.model.state import State
from torchx_monarch.model.world import CommandError

MARKED = {"monarch": {"sidecar": True}}


@pytest.mark.parametrize(
    ("policy", "failed", "tolerated"),
    [
        (RoleSpec("r", 3), set(), True),
        (RoleSpec("r", 3), {2}, False),
        (RoleSpec("r", 3, 3), {2}, False),
        (RoleSpec("r", 3, 2), {2}, True),
        (RoleSpec("r", 3, 2), {1, 2}, False),
        (RoleSpec("r", 3, 2), {0}, False),
        (RoleSpec("r", 3, 0), {1, 2}, True),
    ],
)
def test_which_failures_a_role_tolerates(policy: RoleSpec, failed: set[int], tolerated: bool) -> None:
    assert policy.tolerates(failed) is tolerated
    assert policy.succeeded({0, 1, 2} - failed, failed) is tolerated
    assert not policy.succeeded({0} - failed, failed) or len(failed) == 2


GRACE = 30.0


def one(index: int, state: State, role: str = "r", **more: Any) -> ReplicaSnapshot:
    if state in (State.SUCCEEDED, State.FAILED, State.CANCELLED):
        more.setdefault("ended", 100.0 + index)
    if state is State.FAILED:
        more.setdefault("failure", f"replica {role}/{index} exited with code 3")
    return ReplicaSnapshot(role, index, state, **{"started": 10.0, **more})


def role(*states: State, name: str = "r", **spec: Any) -> RoleSnapshot:
    return RoleSnapshot(
        RoleSpec(name, len(states), **spec), [one(index, state, name) for index, state in enumerate(states)]
    )


def app(*roles: RoleSnapshot, **more: Any) -> AppSnapshot:
    return AppSnapshot("a-1", "a", roles, grace=GRACE, **more)


def error(secondary: bool = False, replica: int = -1) -> str:
    extra = {"consequence": secondary, "replica": replica}
    return json.dumps({"message": {"message": "boom", "errorCode": 3, "extraInfo": extra}})


SPARED: dict[str, Any] = {"min_replicas": 2, "spares": 1, "workload": WorkloadKind.RANKS}
S, F, R, P, C, U = State.SUCCEEDED, State.FAILED, State.RUNNING, State.PENDING, State.CANCELLED, State.UNKNOWN


@pytest.mark.parametrize(
    ("given", "state", "outcome", "stop"),
    [
        pytest.param(app(role(P, P)), P, None, False, id="nothing has started"),
        pytest.param(app(role(R, P)), R, None, False, id="one of two runs"),
        pytest.param(app(role(S, R)), R, None, False, id="one of two has succeeded"),
        pytest.param(app(role(S, S)), S, S, False, id="all have succeeded"),
        pytest.param(app(role(S), role(R, name="other")), R, None, False, id="the first role has ended, and no other"),
        pytest.param(app(role(S), role(R, name="side", sidecar=True)), R, S, True, id="a sidecar is left"),
        pytest.param(app(role(S), role(F, name="side", sidecar=True)), S, S, False, id="a sidecar has failed later"),
        pytest.param(
            app(role(S), RoleSnapshot(RoleSpec("side", sidecar=True), [one(0, F, "side", ended=50.0)])),
            *(F, F, False),
            id="a sidecar had failed before",
        ),
        pytest.param(app(role(R, name="side", sidecar=True)), R, None, False, id="sidecars alone are awaited"),
        pytest.param(app(role(F, S)), F, F, False, id="one has failed and nothing runs"),
        pytest.param(app(role(F, R)), R, F, True, id="one has failed and the other runs"),
        pytest.param(app(role(S, F, S, min_replicas=2)), S, S, False, id="a tolerated failure"),
        pytest.param(app(role(F, S, S, min_replicas=2)), F, F, False, id="replica 0 is needed"),
        pytest.param(app(role(R, F, F, min_replicas=2)), R, F, True, id="too few are left"),
        pytest.param(app(role(C, C), ending=Outcome(C, time=1.0)), C, C, False, id="cancelled and ended"),
        pytest.param(app(role(C, R), ending=Outcome(C, time=1.0)), R, C, False, id="another process cancels it"),
        pytest.param(app(role(S, S), ending=Outcome(C, time=1.0)), S, S, False, id="cancelled after its success"),
        pytest.param(app(role(F, C), ending=Outcome(F, "boom")), F, F, False, id="ended as failed"),
        pytest.param(app(role(U, R, workload=WorkloadKind.RANKS)), R, F, True, id="the record of a host was removed"),
        pytest.param(app(role(U, S)), S, S, False, id="the record of a program was removed"),
        pytest.param(app(role(U, U)), F, F, False, id="all records were removed"),
        pytest.param(app(role(C, C)), F, F, False, id="stopped by nobody known"),
        pytest.param(app(role(F, S), native=Outcome(S)), S, S, False, id="the backend's own controller decides"),
        pytest.param(app(role(F, R), native=Outcome(R)), R, None, False, id="that controller has not decided yet"),
        pytest.param(app(role(F, R), native=Outcome(F)), F, F, False, id="that controller has ended it"),
        pytest.param(app(role(S, S, S, **SPARED)), S, S, False, id="all have succeeded, the spare too"),
        pytest.param(app(role(S, F, S, **SPARED)), S, S, False, id="the spare took the place of replica 1"),
        pytest.param(app(role(S, S, F, **SPARED)), S, S, False, id="the spare was lost"),
        pytest.param(app(role(S, S, P, **SPARED)), R, S, True, id="the spare has never started, and is ended now"),
        pytest.param(app(role(R, F, R, **SPARED)), R, None, False, id="the spare takes the place of replica 1"),
        pytest.param(app(role(R, F, F, **SPARED)), R, F, True, id="one and the spare have failed"),
        pytest.param(app(role(S, R, R, **SPARED)), R, None, False, id="replica 0 has succeeded, beside a spare"),
        pytest.param(app(role(F, R, R, **SPARED)), R, F, True, id="no spare takes the place of replica 0"),
    ],
)
def test_the_state_of_an_app(given: AppSnapshot, state: State, outcome: State | None, stop: bool) -> None:
    status = reduce(given)
    assert (status.state, status.outcome and status.outcome.state) == (state, outcome)
    assert pending_stop(given) == (status.outcome if stop else None)


def groups(*states: State, least: int = 2) -> AppSnapshot:
    """An app of groups with one host each, and a lighthouse."""
    found = [role(state, name=f"group{index}", min_groups=least) for index, state in enumerate(states)]
    return app(*found, role(R, name="lighthouse", sidecar=True, lighthouse_port=29510))


@pytest.mark.parametrize(
    ("given", "state", "outcome"),
    [
        (groups(R, F, R), R, None),
        (groups(R, F, R, least=3), R, F),
        (groups(R, F, F), R, F),
        (groups(R, F, S), R, None),
        (groups(S, F, S), R, S),  # the lighthouse is ended now
        (groups(F, F, F, least=1), R, F),
        (app(*groups(R, F, R).roles[:3], role(F, name="lighthouse", sidecar=True)), R, F),
    ],
)
def test_a_group_may_be_lost_while_enough_others_go_on(given: AppSnapshot, state: State, outcome: State | None) -> None:
    status = reduce(given)
    assert (status.state, status.outcome and status.outcome.state) == (state, outcome)
    lost = "without group1: replica group1/0 exited with code 3"
    if outcome is None:
        assert status.message == f"2 of 3 groups go on, {lost}; lighthouse: http://127.0.0.1:29510"
    elif outcome is S:
        assert status.message == f"2 of 3 groups have succeeded, {lost}; what still runs is ended"


class _Stops:
    """A backend with one app, which records its stops."""

    poll = 0.0

    def __init__(self, app: AppSnapshot) -> None:
        self.app, self.stops = app, list[Outcome]()

    def snapshot(self, app_id: str, *, brief: bool = False) -> AppSnapshot:
        return self.app

    def stop(self, app: AppSnapshot, outcome: Outcome, grace: float | None) -> None:
        self.stops.append(outcome)


def test_a_cancel_does_not_change_how_a_decided_app_ends() -> None:
    backend = _Stops(app(role(F, R)))
    Apps(cast(Any, backend), "b").cancel("a-1")
    assert [outcome.state for outcome in backend.stops] == [F]


def test_what_was_asked_to_stop_is_not_stopped_again() -> None:
    assert pending_stop(app(replace(role(F, R), replicas=[one(0, F), one(1, R, is_stopping=True)]))) is None


def test_what_a_controller_says_of_a_role() -> None:
    queued = replace(role(P, P), reason="waits for Kueue")
    assert reduce(app(queued)) == AppStatus(P, "role r waits for Kueue")
    over = replace(role(S, P), finished=S)
    assert reduce(app(over)).outcome == Outcome(S, time=100.0)
    broken = replace(role(C, C), finished=F, reason="DeadlineExceeded")
    assert reduce(app(broken)).message == "role r failed: DeadlineExceeded"
    tolerated = replace(role(S, F, min_replicas=1), finished=F)
    assert reduce(app(tolerated)).state is S


def test_a_replica_that_can_never_start_fails_the_app() -> None:
    stuck = RoleSnapshot(RoleSpec("r", 2), [one(0, R), one(1, P, waiting="ErrImagePull: no such image", is_stuck=True)])
    status = reduce(app(stuck))
    assert (status.state, status.message) == (R, "replica r/1 cannot start: ErrImagePull: no such image")
    assert pending_stop(app(stuck)) == status.outcome
    waits = replace(stuck, replicas=[one(0, P, waiting="no node"), one(1, P, waiting="no node")])
    assert reduce(app(waits)) == AppStatus(P, "replica r/0: no node (and 1 more replicas wait)")


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        ({"ended": 5.0}, {"ended": 6.0}, 0),
        ({"ended": 6.0}, {"ended": 5.0}, 1),
        ({"ended": 5.0, "error": error(secondary=True)}, {"ended": 6.0}, 1),
        ({"ended": 5.0, "error": error(replica=1)}, {"ended": 6.0}, 1),
        ({"ended": 5.0, "error": error(replica=0)}, {"ended": 6.0}, 0),
        ({"ended": 5.0, "was_stopped": True}, {"ended": 6.0, "error": error(secondary=True)}, 1),
        ({"ended": 5.0, "is_error_lost": True}, {"ended": 6.0, "is_error_lost": True, "error": error()}, 1),
    ],
)
def test_the_root_cause(first: dict[str, Any], second: dict[str, Any], cause: int) -> None:
    failed = RoleSnapshot(RoleSpec("r", 2), [one(0, F, **first), one(1, F, **second)])
    status = reduce(app(failed))
    assert status.cause is failed.replicas[cause]
    assert status.message == f"replica r/{cause} exited with code 3"


def test_the_error_of_another_replica_is_shown_where_the_cause_left_none() -> None:
    failed = RoleSnapshot(RoleSpec("r", 2), [one(0, F, ended=5.0), one(1, F, ended=6.0, error=error(secondary=True))])
    status = reduce(app(failed, notes=["the disk is full"]))
    assert status.cause is failed.replicas[0] and status.error == failed.replicas[1].error
    assert status.message == "replica r/0 exited with code 3; the disk is full"


GONE = ReplicaSnapshot("r", 1, U, started=10.0, failure="r/1 was removed")


@pytest.mark.parametrize(
    ("first", "workload", "notes", "state", "message"),
    [
        # A host succeeds only with its role, so the removed one had ended.
        (one(0, S), WorkloadKind.RANKS, (), S, ""),
        (one(0, F, failure="r/0 failed"), WorkloadKind.RANKS, (), F, "r/0 failed"),
        (one(0, S), WorkloadKind.NONE, (), S, ""),
        # A note that is the message is not repeated.
        (one(0, R), WorkloadKind.RANKS, ("r/1 was removed", "so"), R, "r/1 was removed; so"),
    ],
)
def test_removed_replicas_and_notes(
    first: ReplicaSnapshot, workload: WorkloadKind, notes: tuple[str, ...], state: State, message: str
) -> None:
    found = RoleSnapshot(RoleSpec("r", 2, workload=workload), [first, GONE])
    status = reduce(app(found, notes=notes))
    assert (status.state, status.message) == (state, message)


def test_an_error_that_was_made_of_an_exit_code_gives_way_to_one_that_was_written() -> None:
    made = json.dumps({"message": "replica r/0 was killed by signal 9", "errorCode": -9})
    given = app(RoleSnapshot(RoleSpec("r", 2), [one(0, F, error=made), one(1, F, error=error(secondary=True))]))
    assert reduce(given).error == given.replicas[1].error
    assert reduce(app(RoleSnapshot(RoleSpec("r"), [one(0, F, error=made)]))).error == made


def test_the_error_of_a_tolerated_failure_is_not_that_of_the_app() -> None:
    elastic = RoleSnapshot(
        RoleSpec("e", 3, 2), [one(0, S, "e"), one(1, S, "e"), one(2, F, "e", ended=5.0, error=error())]
    )
    other = RoleSnapshot(RoleSpec("o"), [one(0, F, "o", error=error(replica=7))])
    assert reduce(app(elastic, other)).error == other.replicas[0].error


def test_states_that_are_shown_of_replicas() -> None:
    def shown(given: AppSnapshot) -> list[State]:
        status = reduce(given)
        return [status.state_of(replica) for replica in given.replicas]

    assert shown(app(role(F, R))) == [F, R]
    late = RoleSnapshot(RoleSpec("side", 1, sidecar=True), [one(0, F, ended=200.0)])
    assert shown(app(role(S), late)) == [S, C], "it was ended because the app had succeeded"
    assert shown(app(role(S, F, S, min_replicas=2))) == [S, F, S]
    assert shown(app(role(S, F), ending=Outcome(C, time=1.0))) == [S, C]
    assert shown(app(role(U, S))) == [U, S]
    assert shown(app(role(R, P), native=Outcome(F, "the machine was rebooted"))) == [F, F]


def test_restarts_that_one_failure_has_caused_count_once() -> None:
    def counted(*counts: int, ranks: int = 0, **spec: Any) -> RoleSnapshot:
        replicas = [one(index, S, restarts=count, rank_restarts=ranks) for index, count in enumerate(counts)]
        return RoleSnapshot(RoleSpec("r", len(counts), **spec), replicas)

    assert count_restarts(app(counted(1, 2))) == 2
    assert count_restarts(app(counted(1, 2, retry_policy=RetryPolicy.REPLICA))) == 3
    assert count_restarts(app(counted(1, 1, ends_together=True), counted(2, ends_together=True))) == 2
    assert count_restarts(app(counted(1, ranks=3))) == 4
    restarted = {"time": 1.0, "kind": "rank_restart", "message": ""}
    assert count_restarts(app(counted(1), restarts=7, events=[restarted])) == 8


def test_a_mark_is_kept_and_read() -> None:
    role = Role("r", "image", metadata={"kubernetes": {"x": 1}})
    assert not is_sidecar(role)
    mark_sidecar(role)
    assert is_sidecar(role) and role.metadata == {"kubernetes": {"x": 1}, **MARKED}
    assert RoleSpec.from_role(role) == RoleSpec("r", sidecar=True)
    kept = Role("r", "image", metadata={"monarch": {"sidecar": False}})
    mark_sidecar(kept)
    assert not is_sidecar(kept)


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"wrap": "no"}, "its metadata 'monarch' has 'wrap': 'no'; use True or False"),
        ({"spares": "1"}, "its metadata 'monarch' has 'spares': '1'; use 0 or more"),
        ({"sidecar": "yes"}, "its metadata 'monarch' has 'sidecar': 'yes'; use True or False"),
        ("sidecar", "its metadata 'monarch' is 'sidecar'; it is a dictionary, such as {'sidecar': True}"),
        ({"side_car": True}, "its metadata 'monarch' has the unknown setting 'side_car'. Did you mean sidecar?"),
        ({"spare": 1}, "has the unknown setting 'spare'. Did you mean spares?"),
        ({3: 1}, "has the unknown setting 3. Use sidecar, wrap, spares, "),
    ],
)
def test_settings_of_a_role_that_do_not_exist_are_refused(ours: Any, said: str) -> None:
    app = AppDef("app", [Role("r", "image", entrypoint="sleep", metadata={"monarch": ours})])
    with pytest.raises(CommandError, match=f"role 'r': .*{re.escape(said)}"):
        rewrite(app, WrapOptions())


def test_hosts_that_wait_end_with_those_of_the_first_role() -> None:
    meshes = controller("main.py", meshes={"trainers": "1", "loaders": "2"}, image="")
    assert [is_sidecar(role) for role in meshes.roles] == [False, True]
    roles = [Role(name, "", entrypoint="torchrun", args=["a.py"]) for name in ("a", "b")]
    assert [is_sidecar(role) for role in hold_for_runs(AppDef("app", roles)).roles] == [False, True]
    assert not any(role.metadata for role in roles)


def test_a_spare_that_can_never_start_fails_no_app() -> None:
    for stuck, state in ((2, None), (0, F)):
        replicas = [one(number, P if number == stuck else R, is_stuck=number == stuck) for number in range(3)]
        status = reduce(app(RoleSnapshot(RoleSpec("r", 3, **SPARED), replicas)))
        assert (status.outcome and status.outcome.state) == state


def test_who_follows_an_app_does_not_wait_for_the_answer_of_another() -> None:
    asked, answered = threading.Event(), threading.Event()

    def snapshot(app_id: str, *, brief: bool) -> None:
        if app_id == "slow":
            asked.set()
            assert answered.wait(WITHIN)

    apps = Apps(cast(Any, SimpleNamespace(poll=1.0, snapshot=snapshot)), "b")
    with ThreadPoolExecutor(2) as pool:
        try:
            slow = pool.submit(apps.recent, "slow")
            assert asked.wait(WITHIN)
            assert pool.submit(apps.recent, "fast").result(5) is None and not slow.done()
        finally:
            answered.set()
