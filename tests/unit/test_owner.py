# SPDX-License-Identifier: BSD-3-Clause
"""The owner of an app: for which apps there is one, and what it stops when."""

from __future__ import annotations

from typing import Any

import pytest

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import SETTLE, AppStatus, reduce
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import owner


def hosts(name: str = "a", replicas: int = 2, **more: Any) -> RoleSpec:
    return RoleSpec(name, replicas, workload=WorkloadKind.RANKS, **more)


@pytest.mark.parametrize(
    ("roles", "needed"),
    [
        ([hosts()], False),
        ([hosts(max_retries=1, retry_policy=RetryPolicy.REPLICA)], True),
        ([hosts(), hosts("b")], True),
        ([hosts(replicas=1), RoleSpec("side", sidecar=True)], True),
        ([RoleSpec("a", 2)], True),
        ([RoleSpec("a", 2, workload=WorkloadKind.COMMAND)], True),
        ([RoleSpec("a", 1)], False),
    ],
)
def test_hosts_of_one_role_need_no_owner(roles: list[RoleSpec], needed: bool) -> None:
    assert owner.needs_owner(roles) is needed


class _Apps:
    """An app of two replicas, which is read in states that follow each other, and the clock of its owner."""

    poll = 0.0

    def __init__(self, states: list[tuple[State, State] | None]) -> None:
        self.states, self.now, self.stops = iter(states), 0.0, list[tuple[float, Outcome]]()
        self.backend = self

    def read(self, app_id: str, *, brief: bool) -> tuple[AppSnapshot, AppStatus] | None:
        states = next(self.states)
        if states is None:
            raise BackendError("it does not answer")
        replicas = [ReplicaSnapshot("a", k, state, started=1.0) for k, state in enumerate(states)]
        app = AppSnapshot("a-1", "a", [RoleSnapshot(RoleSpec("a", 2), replicas)])
        return app, reduce(app)

    def stop(self, app: AppSnapshot, outcome: Outcome, grace: float | None) -> None:
        self.stops.append((self.now, outcome))

    def close(self) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_what_runs_on_is_stopped_when_it_has_had_time_to_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run, failed, ended = (State.RUNNING,) * 2, (State.FAILED, State.RUNNING), (State.FAILED, State.FAILED)
    # It may be that a reader errs for a moment, and that nobody answers for a while.
    apps = _Apps([run, failed, run, None, failed, failed, failed, failed, ended])
    monkeypatch.setattr("time.monotonic", lambda: apps.now)
    monkeypatch.setattr("time.sleep", apps.sleep)
    owner.own(apps, "a-1")  # type: ignore[arg-type]
    ((when, outcome),) = apps.stops
    assert outcome.state is State.FAILED and SETTLE <= when - 8.0 <= SETTLE + 2.0
    assert next(apps.states, "all were read") == "all were read"


def test_an_owner_that_is_never_answered_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = _Apps([None] * 100_000)
    monkeypatch.setattr("time.monotonic", lambda: apps.now)
    monkeypatch.setattr("time.sleep", apps.sleep)
    owner.own(apps, "a-1")  # type: ignore[arg-type]
    assert apps.now >= 86400
