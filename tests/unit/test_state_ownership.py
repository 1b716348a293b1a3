# SPDX-License-Identifier: BSD-3-Clause
"""A state directory in which somebody else has planted folders, links and names."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, Role

from torchx_monarch.backends.batch.folder import JobFolder
from torchx_monarch.backends.core import state_files, stored_apps
from torchx_monarch.backends.core.errors import RemoveError, StateAccessError, StateDirError, UserError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local import submit
from torchx_monarch.backends.local.backend import LocalBackend, LocalOpts
from torchx_monarch.backends.local.supervision import SupervisorRecord
from torchx_monarch.backends.slurm.backend import SlurmBackend
from torchx_monarch.cli import main, prune
from torchx_monarch.insight import events
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_local, monarch_slurm
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.system.safe_files import UnsafeFileError

SOMEBODY_ELSE = 12345
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def app(name: str, state: State = State.SUCCEEDED, ended: float | None = None) -> state_files.AppPaths:
    """Write the folder of an app; no process runs."""
    definition = AppDef(name, [Role("r", image="", entrypoint="true")])
    submitted = SubmittedApp(definition, [RoleSpec("r")])
    request = LocalBackend().render(definition, submitted, LocalOpts(grace=5))
    request, lock = submit._make_folder(request, submitted.to_json(), lambda root: None, time.time())
    os.close(lock)
    paths = state_files.app_paths(request.app_id)
    record = SupervisorRecord.load(paths)
    assert record is not None
    record.state, record.ended = state, ended or time.time()
    state_files.write_json(paths.status, asdict(record))
    return paths


def content(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def refused(app_id: str) -> str:
    """The message with which an app is refused, whatever is asked about it."""
    scheduler = monarch_local("torchx")
    messages = set()
    for ask in (scheduler.describe, scheduler.exists, scheduler._cancel_existing, scheduler._delete_existing):
        with pytest.raises(StateAccessError) as error:
            ask(app_id)
        messages.add(str(error.value))
    with pytest.raises(StateAccessError):
        scheduler.log_iter(app_id, "r")
    return messages.pop()


@root_only
@pytest.mark.parametrize("whose", ["the folder", "a link"])
def test_a_planted_app_is_refused_by_name(tmp_path: Path, whose: str, caplog: pytest.LogCaptureFixture) -> None:
    mine, planted = app("mine"), app("planted", State.RUNNING)
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    os.unlink(planted.events) if os.path.exists(planted.events) else None
    os.symlink(precious, planted.events)
    if whose == "the folder":
        os.chown(planted.root, SOMEBODY_ELSE, -1)
        reason = f"belongs to uid {SOMEBODY_ELSE}"
    else:
        elsewhere = tmp_path / "elsewhere"
        os.rename(planted.root, elsewhere)
        os.symlink(elsewhere, planted.root)
        reason = "is a symbolic link"
    assert [app.app_id for app in monarch_local("torchx").list()] == [mine.app_id]
    assert f"{planted.root}: {reason}" in caplog.text
    assert f"{planted.root}: {reason}" in refused(planted.app_id)
    assert precious.read_text() == "mine\n"


@pytest.mark.parametrize("linked", ["files", "a folder"])
def test_a_link_in_an_app_is_not_followed(tmp_path: Path, linked: str) -> None:
    # No supervisor runs: the one who lists notes the end, with an event.
    dead = app("dead", State.RUNNING)
    record = SupervisorRecord.load(dead)
    assert record is not None
    record.created = 0.0
    state_files.write_json(dead.status, asdict(record))
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    logs = Path(dead.replica_logs("r", 0))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.symlink(precious, dead.events)
    if linked == "files":
        for name in ("stderr.log", "combined.log"):
            os.symlink(precious, logs / name)
    else:
        logs.rmdir()
        os.symlink(elsewhere, logs)
    scheduler = monarch_local("torchx")
    assert [app.state for app in scheduler.list()] == [AppState.FAILED]
    assert precious.read_text() == "mine\n"
    assert events.read(dead.events) == ([], 0)
    assert content(elsewhere) == []
    link = logs / "combined.log" if linked == "files" else logs
    assert list(scheduler.log_iter(dead.app_id, "r")) == [
        f"[monarch] this log cannot be read: {link} is a symbolic link\n"
    ]


def test_a_fifo_for_a_log_does_not_hang(tmp_path: Path) -> None:
    paths = app("one")
    log = Path(paths.replica_logs("r", 0), "combined.log")
    os.mkfifo(log)
    os.mkfifo(paths.events)
    scheduler = monarch_local("torchx")
    assert list(scheduler.log_iter(paths.app_id, "r")) == [f"[monarch] this log cannot be read: {log} is a FIFO\n"]
    found = scheduler.describe(paths.app_id)
    assert found is not None and found.state is AppState.SUCCEEDED


def test_another_users_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    app("theirs")
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY_ELSE)
    scheduler = monarch_local("torchx")
    with pytest.raises(StateAccessError, match=r"belongs to .*, not to uid 12345.*\. Set MONARCH_STATE_DIR to"):
        scheduler.list()
    definition = AppDef("mine", [Role("r", image="", entrypoint="true")])
    submitted = SubmittedApp(definition, [RoleSpec("r")])
    request = LocalBackend().render(definition, submitted, LocalOpts(grace=5))
    with pytest.raises(StateDirError, match="belongs to .*MONARCH_STATE_DIR"):
        submit.submit(request, submitted.to_json())
    with pytest.raises(OSError, match="belongs to"):
        stored_apps.credentials("monarch_slurm").store("1", stored_apps.StoredCredentials("secret", {}))


def test_a_state_directory_that_others_may_write_is_refused() -> None:
    os.makedirs(root := state_files.state_dir())
    os.chmod(root, 0o775)
    with pytest.raises(UnsafeFileError, match=rf"is writable for others \(mode 775\): chmod go-w {root}"):
        app("mine")


def test_folders_above_the_state_directory_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / ".local" / "state" / "torchx-monarch"))
    before = os.umask(0)
    try:
        app("mine")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_dir()} == {0o700}


def test_an_unreadable_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = app("theirs")

    def closed(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", paths.trusted)

    monkeypatch.setattr("torchx_monarch.system.safe_files.open_folder", closed)  # root may read everything
    with pytest.raises(StateAccessError, match=f"{paths.trusted}: Permission denied"):
        monarch_local("torchx").list()


def test_names_and_messages_do_not_reach_the_terminal_as_codes() -> None:
    paths = app("x")
    record = SupervisorRecord.load(paths)
    assert record is not None
    record.state, record.name, record.msg = State.FAILED, "\x1b]0;owned\x07", "one\ntwo \x1b[31mred\r"
    record.roles[0].replicas[0].error = record.error = '{"message": "a\\u001b[2J", "errorCode": 1}'
    state_files.write_json(paths.status, asdict(record))
    scheduler = monarch_local("torchx")
    assert [app.name for app in scheduler.list()] == ["\\x1b]0;owned\\x07"]
    found = scheduler.describe(paths.app_id)
    assert found is not None
    assert found.msg == "one\ntwo \\x1b[31mred\\r"
    for error in (found.structured_error_msg, found.roles_statuses[0].replicas[0].structured_error_msg):
        assert error == '{"message": "a\\\\x1b[2J", "errorCode": 1}'


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "x\udcff"])
def test_a_planted_name_does_not_reach_the_terminal(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, planted = app("mine"), app("planted")
    os.rename(planted.root, os.path.join(os.path.dirname(planted.root), name))
    assert [app.app_id for app in monarch_local("torchx").list()] == [mine.app_id]
    assert caplog.text.isprintable()
    # Any folder of the state directory may have such a name, such as the target of a link.
    error = UnsafeFileError(name, "is a link")
    for shown in (error, StateAccessError(error, ""), StateDirError(error, "")):
        assert str(shown).isprintable()


# -- monarch_slurm -----------------------------------------------------------------------------------------------------


@pytest.fixture
def forgetful_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, which know no job; the folder to which sbatch writes its arguments."""
    scripts = {
        "squeue": "",
        "sacct": "",
        "scontrol": "echo Invalid job id; exit 1",
        "sbatch": "touch $0.called; echo 7",
    }
    for name, script in scripts.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path / "bin"


def precious_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("mine\n")
    return path


def slurm_job(parent: str) -> JobFolder:
    """Write the folder of the job 7 of Slurm, which has succeeded."""
    backend = SlurmBackend()
    job = JobFolder(backend.new_folder("train", parent))
    submitted = SubmittedApp(AppDef("train", [Role("r", image="", entrypoint="true")]), [RoleSpec("r")])
    os.makedirs(job.root)
    os.makedirs(backend._index)
    state_files.write_json(job.app, {"created": 1.0, "jobs": ["7"], "grace": 5.0, **submitted.to_json()})
    state_files.write_json(job.status, asdict(SupervisorRecord("7", "train", 1.0, State.SUCCEEDED, ended=2.0)))
    os.symlink(job.root, os.path.join(backend._index, "7"))
    return job


@root_only
@pytest.mark.usefixtures("forgetful_slurm")
def test_another_users_jobs_of_slurm(tmp_path: Path, forgetful_slurm: Path) -> None:
    ids = Path(SlurmBackend()._index)
    ids.mkdir(parents=True)
    precious = precious_folder(tmp_path / "train-0123456789")
    (ids / "99").symlink_to(precious)
    os.chown(ids, SOMEBODY_ELSE, -1)
    scheduler = monarch_slurm("torchx")
    asked: list[Callable[[], object]] = [scheduler.list, partial(scheduler.describe, "99")]
    asked.append(partial(scheduler.delete, "99"))
    for ask in asked:
        with pytest.raises(StateAccessError, match=f"{ids}: belongs to uid {SOMEBODY_ELSE}.*MONARCH_STATE_DIR"):
            ask()
    runner = Runner("torchx", {"monarch_slurm": monarch_slurm})
    role = Role("r", image="", entrypoint="true")
    for cfg in ({}, {"job_dir": str(tmp_path / "jobs")}):
        with pytest.raises(StateDirError, match=f"{ids}: belongs to uid {SOMEBODY_ELSE}.*MONARCH_STATE_DIR"):
            runner.run(AppDef("x", [role]), "monarch_slurm", cfg=cfg)
    assert not (forgetful_slurm / "sbatch.called").exists()
    assert not list(Path(state_files.state_dir()).rglob("request.json"))
    assert content(precious) == ["thesis.tex"]


@pytest.mark.usefixtures("forgetful_slurm")
def test_a_link_of_an_id_names_a_jobs_folder(tmp_path: Path) -> None:
    precious = precious_folder(tmp_path / "train-0123456789")
    os.makedirs(SlurmBackend()._index)
    os.symlink(precious, os.path.join(SlurmBackend()._index, "99"))
    scheduler = monarch_slurm("torchx")
    assert scheduler.list() == []
    assert scheduler.describe("99") is None
    scheduler.delete("99")
    assert content(precious) == ["thesis.tex"]


@pytest.mark.usefixtures("forgetful_slurm")
@pytest.mark.parametrize("scheduler", [monarch_local, monarch_slurm])
def test_a_read_only_state_directory_keeps_the_app(
    scheduler: Callable[[str], MonarchScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    app_id, root = (done := app("done")).app_id, done.root
    if scheduler is monarch_slurm:
        app_id, root = "7", slurm_job(SlurmBackend().root).root

    def read_only(source: str, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)

    for name in ("rename", "unlink"):
        monkeypatch.setattr(os, name, read_only)
    with pytest.raises(RemoveError, match=f"app {app_id} cannot be deleted: .*: Read-only file system"):
        scheduler("torchx").delete(app_id)
    assert os.path.isdir(root)


def test_records_of_a_job_are_not_read_through_links(tmp_path: Path) -> None:
    job = JobFolder(str(tmp_path / "train"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.makedirs(os.path.dirname(job.replica_logs("r", 0)))
    os.symlink(elsewhere, job.replica_logs("r", 0))
    (elsewhere / "replica.json").write_text('{"id": 0, "state": "FAILED"}')
    assert job.replica("r", 0).load_record() is None


def test_prune_removes_jobs_that_ended_long_ago_and_are_large(capsys: pytest.CaptureFixture[str]) -> None:
    """And none that runs, or of another user."""
    parser = argparse.ArgumentParser()
    main.add_arguments("prune", parser)
    now = time.time()
    apps = {name: app(name, ended=now - age) for name, age in (("old", 9e5), ("new", 60.0), ("small", 9e5))}
    apps["runs"] = app("runs", State.RUNNING)
    held = os.open(apps["runs"].lock, os.O_RDWR)  # by its supervisor
    fcntl.flock(held, fcntl.LOCK_EX)
    for name in ("old", "new", "runs"):
        Path(apps[name].root, "much").write_bytes(b"x" * 300_000)

    def left(*words: str) -> set[str]:
        prune.run(parser.parse_args(words))
        return {name for name, paths in apps.items() if os.path.exists(paths.root)}

    for words in ([], ["--larger", "x"], ["--older", "x"]):
        with pytest.raises((UserError, SystemExit)):
            left(*words)
    assert len(left("-s", "monarch_slurm", "--larger", "0")) == 4
    capsys.readouterr()
    assert left("--older", "2d", "--larger", "200K", "--json") == {"new", "small", "runs"}
    (removed,) = json.loads(capsys.readouterr().out)
    assert removed["handle"].endswith(apps["old"].app_id) and 300_000 < removed["bytes"] < 400_000
    assert left("--older", "2d") == {"new", "runs"}
    assert left("--larger", "200K") == {"runs"}
    assert "removed 1 job: 3" in capsys.readouterr().err
    os.close(held)
