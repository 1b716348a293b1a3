# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_pbs, monarch_lsf and monarch_htcondor, with stand-ins for their commands."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from torchx.specs import AppState, Resource

from tests.clusters.batch import commands
from tests.contract.batch import BatchContract
from tests.contract.contract import Contract
from tests.contract.place import BatchPlace
from tests.waits import WITHIN
from torchx_monarch import schedulers
from torchx_monarch.model.role_spec import mark_sidecar

_EVERY_TIME = (
    "test_cancel_while_pending",
    "test_ranks_meet_and_have_their_environment",
    "test_bad_options_are_named",
    "test_doctor_finds_no_fault",
    "test_a_missing_tool_is_named",
)
"""What the commands take part in. The rest of the base is tested with examples/task_spooler.py, too."""

_WITH_ARRAYS = ("test_cancel_while_running", "test_a_failing_command_is_restarted_and_its_log_followed")
"""LSF alone runs these every time: the tasks of its jobs have names of their own."""

_REST = [name for name in dir(Contract) if name.startswith("test_") and name not in (*_EVERY_TIME, *_WITH_ARRAYS)]


class _StandInPlace(BatchPlace):
    """The stand-ins of one system.

    Attributes:
        waits_for: what ``status`` says of a job that is held.
    """

    wire = "stand-in"
    nightly: ClassVar[Sequence[str]] = (*_REST, *_WITH_ARRAYS)
    request_function = "torchx_monarch.backends.batch.backend:BatchBackend.run"
    waits_for: ClassVar[str]

    def is_read(self, *request: object) -> bool:
        """Return whether a command only answers."""
        command = request[1]
        assert isinstance(command, list)
        return command[0] in ("qstat", "qselect", "bjobs", "condor_q")

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Submit a job that is held, and see that its status says so."""
        handle = self.run(self.role("true", replicas=2), submit_args=self.held)
        assert self.waits_for in self.torchx("monarch", "status", handle)
        yield handle

    def shown(self) -> str:
        return "".join(path.read_text() for path in Path(os.environ["BATCH_FOLDER"]).glob("*.json"))

    def left(self, handle: str) -> Sequence[object]:
        return [*super().left(handle), *Path(os.environ["BATCH_FOLDER"]).glob("*.json")]


class _PbsPlace(_StandInPlace):
    name, factory, install = "monarch_pbs", staticmethod(schedulers.monarch_pbs), "openpbs-client"
    cannot: ClassVar = {"preemption": "the stand-in does not preempt"}
    submit, held, waits_for = "qsub", "-h", "Job held by root"


class _LsfPlace(_StandInPlace):
    nightly: ClassVar[Sequence[str]] = _REST
    name, factory, install = "monarch_lsf", staticmethod(schedulers.monarch_lsf), "profile.lsf"
    cannot: ClassVar = {"preemption": "the stand-in does not preempt"}
    submit, held, waits_for = "bsub", "-H", "Job was suspended by the user while pending"


class _HTCondorPlace(_StandInPlace):
    name, factory, install = "monarch_htcondor", staticmethod(schedulers.monarch_htcondor), "htcondor"
    names_preemptions = False  # a task learns of them by SIGTERM
    submit, held, waits_for = "condor_submit", "hold=True", "submitted on hold at user's request"

    def preempt(self, handle: str, replica: int) -> None:
        jobs = self.backend.snapshot(handle.rpartition("/")[2]).jobs  # type: ignore[union-attr]
        command = ["condor_vacate_job", f"{jobs[0]}.{replica}"]
        subprocess.run(command, check=True, capture_output=True, timeout=WITHIN)


class _StandInContract(BatchContract):
    @pytest.fixture(autouse=True)
    def queue(self, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Put the commands on the PATH, with a queue of their own; TEST_REAL_COMMANDS=1 takes those of a cluster."""
        (tmp_path / "queue").mkdir()
        commands.install(tmp_path / "bin")
        if "TEST_REAL_COMMANDS" not in os.environ:
            monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("BATCH_FOLDER", str(tmp_path / "queue"))

    def test_an_allocation_in_the_queue_is_listed(self, place: _StandInPlace) -> None:
        held = ("--workspace", "", "-cfg", f"submit_args='{place.held}'")
        handle = place.adopt(place.torchx("run", "-s", place.name, *held, "monarch.hosts", "-j", "2x1").split()[-1])
        listed = place.torchx("monarch", "ls").splitlines()[1].split()
        assert listed[:2] == [handle.rpartition("/")[2], "PENDING"]


class TestPbs(_StandInContract):
    kind = _PbsPlace

    def test_a_port_that_is_taken_ends_the_job_at_once(self, place: _StandInPlace) -> None:
        """The host that wants it says so, and the other one does not wait for ``host_timeout``."""
        with socket.create_server(("", 0)) as taken:
            cfg = f"rendezvous_port={taken.getsockname()[1]},host_timeout=100000,preload=none"
            words = ("-s", place.name, "-cfg", cfg, "--workspace", "", "monarch.spmd", "-j", "2x1")
            handle = place.adopt(place.torchx("run", *words, place.program("pass")).split()[-1])
            status = place.wait(handle, AppState.FAILED)
        assert "Address already in use" in str(status)

    def test_a_sidecar_ends_after_the_loss_of_the_only_host(self, place: _StandInPlace) -> None:
        side = place.role("sleep", "1000", name="side")
        mark_sidecar(side)
        handle = place.submit_and_die(place.role("sleep", "1000"), side)
        place.until(lambda: set(place.states(handle).values()) == {AppState.RUNNING}, "both tasks", handle)
        jobs = place.backend.snapshot(handle.rpartition("/")[2]).jobs  # type: ignore[union-attr]
        lose = [sys.executable, commands.__file__, "lose_node", f"{jobs[0]}.0"]
        subprocess.run(lose, check=True, timeout=WITHIN)
        assert "node was lost" in place.wait(handle, AppState.FAILED).msg
        assert place.states(handle)["side/0"] is AppState.CANCELLED

    def test_a_job_that_can_never_start_leaves_the_queue_by_a_cancel(self, place: _StandInPlace) -> None:
        handle = place.run(place.role("true", resource=Resource(cpu=1000, gpu=0, memMB=1)))
        assert "trainer/0 cannot start: Can Never Run" in place.wait(handle, AppState.FAILED).msg
        place.torchx("cancel", handle)
        assert not place.shown()

    @pytest.mark.nightly("the owner ends an app after the loss of a node every time")
    def test_an_app_ends_if_one_of_its_jobs_can_never_start(self, place: _StandInPlace) -> None:
        impossible = place.role("true", name="large", resource=Resource(cpu=1000, gpu=0, memMB=1))
        handle = place.submit_and_die(place.role("sleep", "1000"), impossible)
        assert "large/0 cannot start: Can Never Run" in place.wait(handle, AppState.FAILED).msg
        assert place.states(handle)["trainer/0"] is not AppState.RUNNING
        place.until(lambda: not place.shown(), "an empty queue", handle)


class TestLsf(_StandInContract):
    kind = _LsfPlace


class TestHTCondor(_StandInContract):
    kind = _HTCondorPlace
