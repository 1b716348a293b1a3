# SPDX-License-Identifier: BSD-3-Clause
"""Any content of any file in the folder of a Slurm job: it may cost its app's details, and nothing else.

A stand-in answers Slurm's commands. Two jobs were submitted through it, of which the second has ended. Each case
replaces one file of the first, asks everything that a user may ask, and cancels or deletes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import NONE, AppDef, AppState, Role

from tests.contract.place import tree
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.slurm import folder
from torchx_monarch.backends.slurm.in_job import entrypoint
from torchx_monarch.insight import events
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_slurm

ONE, ENDED = "1", "2"

_ERROR = json.dumps({"message": {"message": "boom", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"}}})

_JOB = (
    "JobId={id} JobName=app UserId=me({uid}) GroupId=me(0) JobState={state} Reason=None Requeue=1 Restarts=0 "
    "ExitCode={code} NodeList=n[1-2] Comment={comment} Power= \n"
)


class SlurmCommands:
    """Stands in for Slurm's commands of 22.05, with the controller and the database behind them.

    Attributes:
        says: the state of the job ONE; None where Slurm has forgotten it, "" where it does not answer.
        told: each scancel since this was emptied.
        owner: uid of the jobs' owner.
    """

    def __init__(self) -> None:
        self.says: str | None = "RUNNING"
        self.told: list[list[str]] = []
        self.owner = os.getuid()
        self._comments: dict[str, str] = {}

    def run(self, command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Take the place of ``subprocess.run``, whose errors about words it raises, too."""
        for word in command:
            os.fsencode(word)
            assert "\0" not in word
        code, said = self._answer(list(command))
        return subprocess.CompletedProcess(command, code, said, "Unable to contact slurm controller" if code else "")

    def _answer(self, command: list[str]) -> tuple[int, str]:
        if command[0] == "sbatch":
            app_id = str(len(self._comments) + 1)
            self._comments[app_id] = next(word for word in command if word.startswith("--comment=")).partition("=")[2]
            return 0, f"{app_id}\n"
        if command[0] == "scancel":
            self.told.append(command)
            if self.says == "RUNNING":
                self.says = "CANCELLED"
            return 0, ""
        if self.says == "":
            return 1, ""
        if command[:3] == ["scontrol", "show", "hostnames"]:
            return 0, "n1\nn2\n"
        if command[0] == "scontrol" and (self.says is None or command[-1] != ONE):
            return 1, "slurm_load_jobs error: Invalid job id specified"
        code, comment = "1:0" if self.says == "FAILED" else "0:0", self._comments[ONE]
        lines = {
            "scontrol": _JOB.format(id=ONE, uid=self.owner, state=self.says, code=code, comment=comment),
            "squeue": f"{ONE}|{ONE}|{self.says}|None|app|{comment}\n",
            "sacct": f"{ONE}|{self.says}|{code}|n[1-2]|app\n",
        }
        return (0, "" if self.says is None else lines[command[0]]) if command[0] in lines else (1, "")


class Apps:
    """An app whose folder is as it is while it runs, and one that has ended."""

    def __init__(self, slurm: SlurmCommands) -> None:
        self.slurm = slurm
        self.state_dir = state_files.state_dir()
        self.scheduler = monarch_slurm("torchx")
        runner = Runner("torchx", {"monarch_slurm": monarch_slurm})
        role = Role("r", image="", entrypoint="sh", args=["x.sh"], num_replicas=2, max_retries=1)
        for name in ("one", "ended"):
            runner.run(AppDef(name, [role], {"team": "a"}), "monarch_slurm")
        self.folders = folder.job_folders()
        assert set(self.folders) == {ONE, ENDED}
        self._fill(self.folders[ONE])
        events.append(self.folders[ONE].events, "rank_restart", "rank 0 failed", seconds=1.5, rank=0)
        state_files.write_json(self.folders[ONE].cancel, {"time": time.time()})
        state_files.write_json(self.folders[ENDED].job, {"state": "SUCCEEDED", "ended": 2e9, "nodes": ["n1"]})
        self.files = {path: path.read_bytes() for path in Path(self.folders[ONE].root).rglob("*") if path.is_file()}
        self.restore()

    def _fill(self, run: folder.JobFolder) -> None:
        """Write what the batch step and the tasks of a run write."""
        started_task = {"job_id": "1", "started": 1e9, "restarts": 1, "retries": 1, "role_restarts": {"r": 1}}
        for replica, state in enumerate(("RUNNING", "FAILED")):
            logs = Path(run.replica_logs("r", replica))
            logs.mkdir(parents=True)
            (logs / "combined.log").write_bytes(b"one\ntwo\n")
            (logs / "combined.log.idx").write_bytes(bytes(16))
            record = {"id": replica, "state": state, "pid": 7, "exit_code": None, "restarts": 2, "error": None}
            if state == "FAILED":
                record |= {"exit_code": 1, "error": _ERROR, "ended": 2e9}
            state_files.write_json(
                run.record("r", replica), {**record, "started": 1e9, "hostname": "n1", "job_restart": replica}
            )
        state_files.write_json(run.job, {**started_task, "nodes": ["n[1-2]"]})

    def restore(self) -> None:
        """Undo what a case has done."""
        for path in Path(self.folders[ONE].root).rglob("*"):
            if path in self.files and not path.is_file():
                path.rmdir() if path.is_dir() else path.unlink()
        for path, content in self.files.items():
            if path.name == "cancel.json":  # nobody has cancelled the job
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        self.slurm.says, self.slurm.owner = "RUNNING", os.getuid()
        self.slurm.told.clear()
        self.scheduler.inner._asked.clear()


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apps]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_STATE_DIR", str(tmp_path_factory.mktemp("fuzz")))
        slurm = SlurmCommands()
        patch.setattr("torchx_monarch.backends.slurm.native.subprocess.run", slurm.run)
        yield Apps(slurm)


@pytest.fixture(autouse=True)
def in_their_state_dir(apps: Apps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", apps.state_dir)


@pytest.mark.parametrize("words", [["job"], ["task", "r", ONE, "0"]], ids=lambda words: words[0])
def test_step_with_a_damaged_request_ends_with_a_message(tmp_path: Path, words: list[str]) -> None:
    paths = folder.JobFolder(str(tmp_path))
    state_files.write_json(paths.request, {"roles": 5})
    command = [sys.executable, "-I", "-S", entrypoint.__file__, words[0], paths.root, *words[1:]]
    pid = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 2, tmp_path / "err", os.O_WRONLY | os.O_CREAT, 0o600)],
    )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert (tmp_path / "err").read_text().startswith(f"{paths.request} is damaged: the object lacks 'name'")


def test_file_that_states_another_end_keeps_nobody_from_cancelling(apps: Apps) -> None:
    runner = Runner("torchx", {"monarch_slurm": lambda session_name, **_: apps.scheduler})
    state_files.write_json(apps.folders[ONE].job, {"state": "SUCCEEDED", "msg": "", "ended": 1e9})
    runner.cancel(f"monarch_slurm://torchx/{ONE}")
    assert apps.slurm.told
    apps.restore()


def test_damaged_record_of_the_batch_step_is_named_where_slurm_does_not_know_the_job(apps: Apps) -> None:
    paths = apps.folders[ONE]
    try:
        state_files.write_json(paths.job, {"state": 5})
        found = apps.scheduler.describe(ONE)
        assert found is not None and found.state is AppState.RUNNING
        apps.slurm.says = None
        with pytest.raises(BackendError, match=f"^{paths.job} is damaged: state is 5, not one of "):
            apps.scheduler.describe(ONE)
        assert ONE not in [each.app_id for each in apps.scheduler.list()]
    finally:
        apps.restore()


@pytest.mark.parametrize("says", ["RUNNING", "TIMEOUT", "COMPLETED", None])
def test_reading_a_job_writes_nothing(apps: Apps, says: str | None) -> None:
    apps.slurm.says = says
    before = tree(apps.state_dir)
    for app_id in (ONE, ENDED):
        assert apps.scheduler.describe(app_id) is not None
    apps.scheduler.list()
    assert tree(apps.state_dir) == before
    apps.restore()


def test_error_of_a_replica_is_shown_without_what_torchx_cannot_read(apps: Apps) -> None:
    paths = apps.folders[ONE]
    try:
        record = state_files.read_json(paths.record("r", 1))
        for error in ("[]", '{"message": ', '{"message": {"message": "boom", "extraInfo": 5}, "x": [1]}'):
            state_files.write_json(paths.record("r", 1), {**(record or {}), "error": error})
            state_files.write_json(paths.job, {"state": "FAILED", "msg": "", "role": "r", "ended": time.time()})
            found = apps.scheduler.describe(ONE)
            assert found is not None and found.state is AppState.FAILED
            wanted = '{"message": {"message": "boom"}}' if "boom" in error else NONE
            assert found.structured_error_msg == wanted
    finally:
        apps.restore()


@pytest.mark.parametrize("says", ["RUNNING", "FAILED"])
def test_job_of_another_user_is_shown_and_neither_cancelled_nor_deleted(apps: Apps, says: str) -> None:
    """Its comment names a folder of this user."""

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in Path(apps.folders[ONE].root).rglob("*") if path.is_file()}

    before = files()
    apps.slurm.says, apps.slurm.owner = says, os.getuid() + 4242
    words = f"job {ONE} belongs to another user, {os.getuid() + 4242}: only"
    try:
        found = apps.scheduler.describe(ONE)
        assert found is not None and found.state is AppState[says]
        with pytest.raises(UserError, match=words):
            apps.scheduler.delete(ONE)
        # There is nothing to cancel of a job that has ended.
        with pytest.raises(UserError, match=words) if says == "RUNNING" else contextlib.nullcontext():
            apps.scheduler.cancel(ONE)
        snapshot = apps.scheduler.inner.snapshot(ONE)
        with pytest.raises(UserError, match=words):
            apps.scheduler.inner.stop(snapshot, Outcome(State.CANCELLED), 0)
        assert files() == before and not apps.slurm.told
    finally:
        apps.restore()


def test_an_app_whose_description_is_not_here_is_shown_by_its_components(apps: Apps) -> None:
    try:
        Path(apps.folders[ONE].app).unlink()
        found = apps.scheduler.describe(ONE)
        assert found is not None and found.state is AppState.RUNNING
        assert [(role.role, len(role.replicas)) for role in found.roles_statuses] == [("app", 1)]
        with pytest.raises(UserError, match="app 1 has no role 'r'; its roles are app"):
            apps.scheduler.log_iter(ONE, "r")
    finally:
        apps.restore()


def test_running_job_whose_folder_was_removed_is_found_and_cancelled(apps: Apps) -> None:
    root = apps.folders[ONE].root
    aside = Path(root).rename(f"{root}.aside")
    try:
        assert (ONE, AppState.RUNNING) in [(each.app_id, each.state) for each in apps.scheduler.list()]
        found = apps.scheduler.describe(ONE)
        assert found is not None and found.state is AppState.RUNNING
        assert found.msg.startswith(f"its folder {root} was removed")
        apps.scheduler.cancel(ONE)
        assert [words[-1] for words in apps.slurm.told] == [ONE]
        # Slurm has ended it: it counts as deleted.
        assert apps.scheduler.describe(ONE) is None
        assert ONE not in [each.app_id for each in apps.scheduler.list()]
    finally:
        aside.rename(root)
        apps.restore()


def test_an_app_that_its_batch_step_watches_over_is_not_ended_by_a_reader(apps: Apps) -> None:
    """Of its two replicas one has failed long ago: the batch step decides what follows."""
    found = apps.scheduler.describe(ONE)
    assert found is not None and found.state is AppState.RUNNING
    assert [replica.state.name for replica in found.roles_statuses[0].replicas] == ["PENDING", "FAILED"]
    assert not apps.slurm.told
