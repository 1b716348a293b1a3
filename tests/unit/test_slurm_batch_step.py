# SPDX-License-Identifier: BSD-3-Clause
"""What the batch step of a Slurm job decides when steps end, without Slurm: the tasks' records are written here."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.slurm import records
from torchx_monarch.backends.slurm.container import last_error
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.in_job import batch_step, commands
from torchx_monarch.backends.slurm.in_job.batch_step import BatchStep
from torchx_monarch.backends.slurm.records import BatchRecord, TaskRecord
from torchx_monarch.backends.slurm.request import SlurmRequest, SlurmRole
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.system import safe_files

S, F, C, R = State.SUCCEEDED, State.FAILED, State.CANCELLED, State.RUNNING
TERMINATED = 143


class Batch(BatchStep):
    """A batch step that notes what it would start, and has no steps."""

    started: list[tuple[str, ...]]

    def _start(self, names: Any) -> None:
        self.started.append(tuple(names))
        for name in names:
            self._record.role_restarts[name] = self._record.restarts


Make = Callable[..., Batch]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the batch step of an app with these roles."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(commands, "_run", lambda *words: "RUNNING")
    monkeypatch.setattr(batch_step, "_REQUEUE_TIMEOUT", 0.0)

    def made(*specs: RoleSpec, **more: Any) -> Batch:
        for index in range(len(specs)):
            monkeypatch.setenv(f"MONARCH_NODES_{index}", f"n{index}")
        roles = [SlurmRole(spec, ["x"], {}, "/", "") for spec in specs]
        batch = Batch(JobFolder(str(tmp_path)), SlurmRequest("app", str(tmp_path), "python", roles, **more), ())
        batch.started = []
        return batch

    return made


def write(batch: Batch, role: str, *states: State | tuple[State, int], **more: Any) -> None:
    """Write the records of a role's replicas, the first of which ends last."""
    for replica, given in enumerate(states):
        state, code = given if isinstance(given, tuple) else (given, {S: 0, C: TERMINATED, F: 3}.get(given))
        restart = batch._record.role_restarts[role]
        record = TaskRecord(replica, state, exit_code=code, ended=100.0 - replica, job_restart=restart, **more)
        path = batch._paths.record(role, replica)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        state_files.write_json(path, asdict(record))


def end(batch: Batch, role: str, code: int) -> None:
    batch._ended[role] = code, time.time()
    batch._decide()


def test_a_run_has_succeeded_when_all_roles_but_sidecars_have(make: Make) -> None:
    batch = make(RoleSpec("a"), RoleSpec("b"), RoleSpec("side", sidecar=True))
    end(batch, "a", 0)
    assert not bool(batch._stopping)
    end(batch, "b", 0)
    assert batch._stopping == "every role that the job waits for has succeeded"
    assert batch._conclude() == 0
    record = records.read(BatchRecord, batch._paths.job, batch._paths.trusted)
    assert record is not None and (record.state, record.msg, record.job_id) == (S, "", "7")


def test_a_sidecar_that_fails_first_fails_the_run(make: Make) -> None:
    batch = make(RoleSpec("a"), RoleSpec("side", sidecar=True))
    write(batch, "side", F)
    end(batch, "side", 3)
    assert batch._stopping == "role side failed"


@pytest.mark.parametrize(
    ("states", "code", "message"),
    [
        ((F, (F, 5)), 5, "role r ended with exit code 5"),
        ((C, (F, 5)), 5, "role r ended with exit code 5"),
        # srun has stopped the first: that signal may reach the process before it reaches the task.
        (((F, TERMINATED), C, (F, 4)), 4, "role r ended with exit code 4"),
        (((F, -9), S), 137, "role r ended with exit code 137"),
        (((F, 78), S), 78, "role r ended with exit code 78; not started again: exit code 78 .* asks for no restart"),
        ((), 9, "role r ended with exit code 9"),  # srun could not start the tasks
        ((R, R), 9, "role r ended with exit code 9"),
    ],
)
def test_the_exit_code_is_that_of_the_root_cause(make: Make, states: tuple[Any, ...], code: int, message: str) -> None:
    batch = make(RoleSpec("r", max(len(states), 1)))
    write(batch, "r", *states)
    end(batch, "r", 9)
    assert batch._stopping == "role r failed"
    assert batch._conclude() == code
    assert batch._record.state is F
    assert re.fullmatch(message, batch._record.msg), batch._record.msg


def test_a_replica_that_reports_the_loss_of_another_is_not_the_cause(make: Make) -> None:
    batch = make(RoleSpec("r", 2, workload=WorkloadKind.RANKS))
    lost = json.dumps({"message": {"message": "host 0 was lost", "extraInfo": {"consequence": True}}})
    write(batch, "r", (F, 6), (F, 1), error=lost)
    write(batch, "r", (F, 6))  # it ends later, and has no error file
    end(batch, "r", 6)
    assert batch._outcome.code == 6


@pytest.mark.parametrize(("states", "state"), [((S, F, S), S), ((S, F, F), F), ((F, S, S), F), ((S, R, S), S)])
def test_an_elastic_role_tolerates_failures(make: Make, states: tuple[State, ...], state: State) -> None:
    batch = make(RoleSpec("r", 3, min_replicas=2))
    write(batch, "r", *states)
    end(batch, "r", 3)
    assert batch._outcome.state is state


def test_tasks_that_slurm_has_stopped_are_no_failure(make: Make) -> None:
    batch = make(RoleSpec("r", 2), requeue=False)
    write(batch, "r", C, (F, TERMINATED))
    end(batch, "r", TERMINATED)
    assert batch._stopping == "role r was told to stop"
    assert batch._conclude() == TERMINATED
    assert (batch._record.state, batch._record.outside) == (F, True)


def test_a_role_is_restarted_alone_while_it_has_retries(make: Make) -> None:
    role = RoleSpec("again", max_retries=1, retry_policy=RetryPolicy.ROLE)
    batch = make(RoleSpec("main"), role)
    for restarts in ([("again",)], [("again",)]):
        write(batch, "again", F)
        end(batch, "again", 3)
        assert batch.started == restarts
    assert batch._stopping == "role again failed"
    assert (batch._record.restarts, batch._record.retries) == (1, 0)
    assert batch._record.role_restarts == {"main": 0, "again": 1}


@pytest.mark.parametrize("how", ["in_place", "requeue"])
def test_the_app_is_restarted_while_it_has_retries(make: Make, how: str) -> None:
    spec = RoleSpec("r", max_retries=1)
    batch = make(spec, retry=how)
    write(batch, "r", F)
    end(batch, "r", 3)
    assert batch._conclude() == (None if how == "in_place" else 3)
    assert batch.started == ([("r",)] if how == "in_place" else [])
    assert not batch._stopping or how == "requeue"
    record = records.read(BatchRecord, batch._paths.job, batch._paths.trusted)
    assert record is not None and record.retries == 1
    # The batch step of the next start of the job, which Slurm has queued again, continues the count.
    following = make(spec)
    write(following, "r", F)
    end(following, "r", 3)
    assert (following._conclude(), following._record.restarts) == (3, record.restarts + 1)
    assert following._record.started == record.started


@pytest.mark.parametrize("reserve", [True, False])
def test_a_full_disk_costs_no_job_and_not_its_cause(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reserve: bool
) -> None:
    batch = make(RoleSpec("other"), RoleSpec("r", max_retries=1, retry_policy=RetryPolicy.ROLE))
    batch._write()
    write(batch, "r", F)
    if reserve:
        safe_files.make_reserve(batch._paths.reserve, batch_step._RESERVE)

    def full(path: str, value: object, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(state_files, "write_json", full)
    end(batch, "r", 3)  # the other role goes on
    assert batch.started == [("r",)]
    assert batch._finish(F, "role r ended with exit code 3", 3) == 3
    record = records.read(BatchRecord, batch._paths.job, batch._paths.trusted)
    assert record is not None
    assert (record.state, record.msg) == ((F, "role r ended with exit code 3") if reserve else (R, ""))
    told = capfd.readouterr().out
    assert told.count("could not be written: [Errno 28] No space left on device") == (1 if reserve else 2)


def test_a_removed_folder_does_not_end_the_batch_step(make: Make, tmp_path: Path) -> None:
    batch = make(RoleSpec("r"))
    tmp_path.rename(f"{tmp_path}.removed")
    assert batch._finish(S, "", 0) == 0


def test_the_jobs_log_on_a_full_disk() -> None:
    code = "from torchx_monarch.backends.slurm.in_job.commands import say; say('lost')"
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, timeout=60, check=False).returncode == 0


def test_a_fifo_in_the_place_of_the_jobs_log(tmp_path: Path) -> None:
    log = str(tmp_path / "job.log")
    os.mkfifo(log)
    assert last_error(log) == ""


def failed_twice(make: Make, policy: RetryPolicy) -> Batch:
    """The batch step of an app whose role "r" has failed at once for the second time."""
    batch = make(RoleSpec("other"), RoleSpec("r", max_retries=5, retry_policy=policy))
    for _ in range(2):
        write(batch, "r", F)
        batch._began["r"] = time.time()
        end(batch, "r", 3)
        if policy is RetryPolicy.APPLICATION:
            assert batch._conclude() is None
    return batch


@pytest.mark.parametrize("policy", [RetryPolicy.ROLE, RetryPolicy.APPLICATION])
def test_restarts_wait_longer_and_longer(make: Make, monkeypatch: pytest.MonkeyPatch, policy: RetryPolicy) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    batch = failed_twice(make, policy)
    scope = ("r",) if policy is RetryPolicy.ROLE else ("other", "r")
    batch._start_due()
    assert batch.started == [scope] and set(batch._due) == set(scope)
    assert batch._snapshot().roles[1].replicas[0].state is R  # it is not over, and not to be decided about again
    record = records.read(BatchRecord, batch._paths.job, batch._paths.trusted)
    assert record is not None and record.role_restarts["r"] == 2  # clients see that the failed attempt is over
    wait = r"is restarted \(restart 2\); the restart waits \d\.\d s: the last attempt failed after 0.0 s"
    assert re.search(wait, Path(batch._paths.events).read_text())
    clock[0] += 1.0
    batch._start_due()
    assert batch.started == [scope, scope] and not batch._due
    record = records.read(BatchRecord, batch._paths.job, batch._paths.trusted)
    assert record is not None and record.restarts == 2 and record.role_restarts["r"] == 2
    write(batch, "r", F)
    batch._began["r"] = time.time() - 61.0  # it has lived
    end(batch, "r", 3)
    if policy is RetryPolicy.APPLICATION:
        batch._conclude()
    assert batch.started == [scope] * 3


def test_a_cancel_ends_the_wait_for_a_restart(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    batch = failed_twice(make, RetryPolicy.APPLICATION)
    assert batch._due
    batch._stop("cancelled")
    assert not batch._due and batch._conclude() == TERMINATED
    assert batch._record.state is C


def test_a_cancel_overrides_a_failure(make: Make) -> None:
    batch = make(RoleSpec("r", max_retries=1))
    write(batch, "r", F)
    end(batch, "r", 3)
    batch._stop("cancelled")
    assert batch._conclude() == TERMINATED
    assert (batch._record.state, batch._record.msg) == (C, "cancelled")
