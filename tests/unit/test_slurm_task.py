# SPDX-License-Identifier: BSD-3-Clause
"""What one node's task of a Slurm job does between the starts of its replica, without Slurm and processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchx_monarch.backends.slurm import records
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.in_job.task import _CHECK_STOPPED_EVERY, Task
from torchx_monarch.backends.slurm.in_job.task_start import StartedTask
from torchx_monarch.backends.slurm.request import SlurmRequest, SlurmRole
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import stopped_hosts
from torchx_monarch.supervisor.replica import Replica
from torchx_monarch.system import processes

PID = 12345


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The task of a replica that runs, whose process is none."""
    paths = JobFolder(str(tmp_path))
    logs = paths.replica_logs("r", 0)
    os.makedirs(logs)
    spec = RoleSpec("r", max_retries=9, retry_policy=RetryPolicy.REPLICA)
    environ = {"TORCHELASTIC_ERROR_FILE": f"{logs}/error.json", "MONARCH_JOB": "x:1", "MONARCH_LOG_DIR": logs}
    given: dict[str, Any] = dict(
        paths=paths, role="r", replica=0, restart=0, node="n", log_dir=logs, command=["x"], cwd="/", wake=-1
    )
    started = SimpleNamespace(**given, environ={**environ, "MONARCH_RUN_DIR": str(tmp_path)}, job="x:1")
    request = SlurmRequest("app", str(tmp_path), "python", [SlurmRole(spec, ["x"], {}, "/", "")])

    def start(replica: Replica) -> bool:
        replica.record.pid, replica.record.state, replica.record.started = PID, State.RUNNING, time.time()
        return True

    monkeypatch.setattr(Replica, "start", start)
    made = Task(cast(StartedTask, started), request)
    made._start()
    return made


def test_the_second_restart_waits_and_a_stop_ends_the_wait(task: Task) -> None:
    replica, paths = task._replica, task._started_task.paths
    task._on_exit(PID, 3)
    assert replica.alive and not task._waits
    task._on_exit(PID, 3)
    assert task._waits and not replica.alive and len(task._timers) == 1
    record = records.read_task(paths, "r", 0)
    assert record is not None and record.state is State.RUNNING  # it has not failed for good
    assert "the restart waits" in Path(replica.log_dir, "combined.log").read_text()
    task._on_signals(bytes([signal.SIGURG]))
    assert not task._waits and not task._timers and task._record.state is State.CANCELLED
    task._write()
    record = records.read_task(paths, "r", 0)
    assert record is not None and (record.state, record.exit_code) == (State.CANCELLED, 3)


def test_a_stopped_host_counts_as_lost(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the only one, so that no other host notices."""
    killed: list[str] = []
    monkeypatch.setattr(Replica, "kill", lambda replica, failure: killed.append(failure))
    monkeypatch.setattr(processes, "hosts", lambda pids: {pid: [pid + 1] for pid in pids})
    monkeypatch.setattr(stopped_hosts, "_is_stopped", lambda pid: True)
    looks = int(30.0 / _CHECK_STOPPED_EVERY) + 1
    for _ in range(looks):
        task._look_for_stopped()
        assert not killed
    task._look_for_stopped()
    assert killed == [
        f"its host (pid {PID + 1}) does not answer: stopped (SIGSTOP) for {(looks + 1) * _CHECK_STOPPED_EVERY:g} s"
    ]


def test_the_second_restart_comes(task: Task) -> None:
    for _ in range(2):
        task._on_exit(PID, 3)
    ((_, call),) = task._timers
    call()
    assert task._replica.alive and not task._waits and task._record.restarts == 2
