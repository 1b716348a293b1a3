# SPDX-License-Identifier: BSD-3-Clause
"""What the supervisor of monarch_local decides about restarts, without processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.local.supervision import RoleRequest, SupervisorRecord, SupervisorRequest
from torchx_monarch.backends.local.supervisor_loop import SupervisorLoop
from torchx_monarch.insight import events
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import replica as replica_module
from torchx_monarch.supervisor.replica import Replica
from torchx_monarch.system import processes


class Loop(SupervisorLoop):
    """A supervisor that notes what it would start, and whose replicas end when the test says so."""

    started: list[str]

    def _start(self, replicas: Iterable[Replica]) -> None:
        for replica in replicas:
            self.started.append(replica.name)
            replica.record.state, replica.record.started = State.RUNNING, time.time()

    def end(self, name: str, state: State, lived: float = 0.0) -> None:
        (replica,) = (replica for replica in self._replicas if replica.name == name)
        replica.record.state, replica.record.ended = state, (replica.record.started or 0.0) + lived
        (self._on_success if state is State.SUCCEEDED else self._on_failure)(replica)

    def pass_time(self) -> None:
        """Let what is due in the next hour happen."""
        for timer in self._timers.queue:
            self._timers.cancel(timer)
            self._timers.enterabs(0.0, 0, timer.action)
        self._on_time()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    # The children of this process are those of other tests.
    monkeypatch.setattr(processes, "own_descendants", lambda job: [])

    def made(*specs: RoleSpec) -> Loop:
        roles = [RoleRequest(spec, ["x"], {}, "/") for spec in specs]
        paths = state_files.app_paths("x")
        for spec in specs:
            for replica in range(spec.replicas):
                os.makedirs(paths.replica_logs(spec.name, replica))
        request = SupervisorRequest("x", "x", roles, run_dir=paths.run, job="x:1")
        Path(paths.request).touch()
        record = SupervisorRecord.new(request, time.time(), "here")
        record.state = State.RUNNING
        loop = Loop(paths, request, record)
        loop.started = []
        loop._start(loop._replicas)
        return loop

    return made


@pytest.mark.parametrize("policy", list(RetryPolicy))
def test_restarts_wait_longer_and_longer(make: Callable[..., Loop], policy: RetryPolicy) -> None:
    loop = make(RoleSpec("r", max_retries=1000, retry_policy=policy))
    for count in range(4):
        loop.end("r/0", State.FAILED)
        assert len(loop.started) == 1 + max(1, count)  # the first restart is immediate
        loop.pass_time()
        assert len(loop.started) == 2 + count
    loop.end("r/0", State.FAILED, lived=61.0)
    assert len(loop.started) == 6
    restarts = [event["message"] for event in events.read(loop._paths.events)[0] if event["kind"] == "restart"]
    pattern = r"the restart waits ([\d.]+) s: the last attempt failed after 0.0 s"
    waits = [re.findall(pattern, text) for text in restarts]
    assert [len(found) for found in waits] == [0, 1, 1, 1, 0]
    assert [0.5 * 2**k <= float(found[0]) <= 2**k for k, found in enumerate(waits[1:4])] == [True] * 3
    assert "the restart waits" in Path(loop._paths.replica_logs("r", 0), "combined.log").read_text()


def test_a_cancel_ends_the_wait_for_a_restart(make: Callable[..., Loop]) -> None:
    loop = make(RoleSpec("r", max_retries=1000))
    for _ in range(2):
        loop.end("r/0", State.FAILED)
    loop._on_cancel()
    assert loop._done and loop._record.state is State.CANCELLED
    loop.pass_time()
    assert len(loop.started) == 2


def test_a_host_that_waits_for_its_restart_is_not_started_after_its_role_has_succeeded(
    make: Callable[..., Loop],
) -> None:
    role = RoleSpec("r", 2, max_retries=9, retry_policy=RetryPolicy.REPLICA, workload=WorkloadKind.RANKS)
    loop = make(role)
    for _ in range(2):
        loop.end("r/1", State.FAILED)
    loop.end("r/0", State.SUCCEEDED)
    assert loop._done and loop._record.state is State.SUCCEEDED
    assert loop.started == ["r/0", "r/1", "r/1"]


def test_a_replica_can_be_spared_and_a_second_cannot(make: Callable[..., Loop]) -> None:
    loop = make(RoleSpec("r", 3, min_replicas=2))
    loop.end("r/1", State.FAILED)
    spared = [event["message"] for event in events.read(loop._paths.events)[0] if event["kind"] == "replica_spared"]
    assert len(spared) == 1 and spared[0].endswith("; 2 of 3 are left, and 2 are enough")
    assert loop._outcome is None
    loop.end("r/2", State.FAILED)
    assert loop._outcome is not None and loop._outcome.state is State.FAILED


def test_a_host_has_some_time_more_than_a_program_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(processes, "hosts", lambda pids: {1: [], 2: [7]})
    program, host = (Mock(alive=True, **{"record.pid": pid}) for pid in (1, 2))
    killed: list[tuple[float, object]] = []
    replica_module.stop([program, host], 30.0, lambda when, kill: killed.append((when, kill)))
    assert killed == [(130.0, program.kill), (130.0 + HOST_EXTRA, host.kill)]
    program.terminate.assert_called_once_with([], False)
    host.terminate.assert_called_once_with([7], False)


def test_a_host_reads_no_half_of_a_request_to_stop(
    make: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may have signalled it before: it would not save, as if somebody had cancelled the job."""
    monkeypatch.setattr(processes, "kill", Mock())
    (replica,) = make(RoleSpec("r"))._replicas
    replica.record.pid, replica.env["MONARCH_RUN_DIR"] = 1, str(tmp_path)
    (read := tmp_path / "stop.0.0.0").touch()
    (begun := tmp_path / "begun").hardlink_to(read)
    replica.terminate([], saves=True)
    assert (begun.read_text(), read.read_text()) == ("", "save")
