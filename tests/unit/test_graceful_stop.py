# SPDX-License-Identifier: BSD-3-Clause
"""How long replicas have to end, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.supervisor import replica
from torchx_monarch.system import processes

GRACE = 30.0


class Clock:
    """Timers that fire when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._timers.append((when, call))

    def move(self, to: float) -> None:
        """Move on, and fire what is due."""
        self.now = to
        due = [call for when, call in self._timers if when <= to]
        self._timers = [(when, call) for when, call in self._timers if when > to]
        for call in due:
            call()


class Replica:
    """A replica that ends when it is killed."""

    def __init__(self, pid: int) -> None:
        self.record = SimpleNamespace(pid=pid)
        self.alive = True
        self.told = False

    def terminate(self, hosts: object) -> None:
        self.told = True

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the module; the replica of pid 2 has a host."""
    clock = Clock()
    monkeypatch.setattr(replica, "time", clock)
    monkeypatch.setattr(processes, "hosts", lambda pids: {pid: [7] if pid == 2 else [] for pid in pids})
    return clock


def stop(replicas: list[Replica], grace: float, clock: Clock) -> None:
    replica.stop(replicas, grace, clock.at)  # type: ignore[arg-type]


def test_a_host_has_some_time_more(clock: Clock) -> None:
    program, host = Replica(1), Replica(2)
    stop([program, host], GRACE, clock)
    assert program.told and host.told
    clock.move(GRACE - 0.1)
    assert program.alive and host.alive
    clock.move(GRACE)
    assert not program.alive and host.alive
    clock.move(GRACE + HOST_EXTRA - 0.1)
    assert host.alive
    clock.move(GRACE + HOST_EXTRA)
    assert not host.alive
