# SPDX-License-Identifier: BSD-3-Clause
"""Many apps, and what one costs."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from torchx.specs import AppDef, AppState

from tests.local.detached import NAME, Detached, sh
from tests.waits import until
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.local import folder
from torchx_monarch.backends.local.folder import prune
from torchx_monarch.backends.local.record import RoleRecord, SupervisorRecord
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.replica import ReplicaRecord


def old_app(name: str, ended: float, state: State = State.SUCCEEDED) -> None:
    paths = state_files.app_paths(name)
    os.makedirs(paths.root)
    record = SupervisorRecord(name, "old", created=ended - 10, state=state, ended=ended)
    record.roles = [RoleRecord("r", [ReplicaRecord(k, state=state, exit_code=0) for k in range(4)])]
    state_files.write_json(paths.status, asdict(record))


def test_ten_submissions_at_once(apps: Detached) -> None:
    with ThreadPoolExecutor(10) as pool:
        ids = list(pool.map(lambda n: apps.run(sh(f"echo {n}")), range(10)))
    assert len(set(ids)) == 10
    for n, app_id in enumerate(ids):
        assert apps.wait(app_id).state is AppState.SUCCEEDED
        assert apps.log(app_id) == [f"{n}\n"]
    assert len(apps.scheduler.list()) == 10


def test_one_dry_run_is_submitted_once(apps: Detached) -> None:
    info = apps.runner.dryrun(AppDef("a", [sh("echo ${app_id}")]), NAME)
    app_id = apps.runner.schedule(info).rpartition("/")[2]
    with pytest.raises(UserError, match=f"submitted already, as {app_id}"):
        apps.runner.schedule(info)
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id) == [f"{app_id}\n"]


def test_pruning(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    now, day = time.time(), 86400
    old_app("old-kept", now - 13 * day)
    old_app("old-gone", now - 15 * day)
    old_app("old-running", now - 99 * day, state=State.RUNNING)
    lock = folder.lock(state_files.app_paths("old-running"))
    trash = Path(state_files.apps_dir(), ".trash-1-x")
    trash.mkdir()
    os.utime(trash, (0, 0))
    Path(state_files.apps_dir(), "mine").mkdir()
    (Path(state_files.apps_dir(), "note.txt")).touch()
    app_id = apps.run(sh("true"))
    apps.wait(app_id)
    until(lambda: not Path(state_files.app_paths("old-gone").root).exists(), "the old app to go")
    kept = {"old-kept", "old-running", "mine", "note.txt", app_id}
    until(lambda: {path.name for path in Path(state_files.apps_dir()).iterdir()} == kept, "the rest to go")
    monkeypatch.setenv("MONARCH_KEEP_DAYS", "1")
    assert prune(state_files.apps_dir()) == ["old-kept"]
    monkeypatch.setenv("MONARCH_KEEP_DAYS", "many")
    assert prune(state_files.apps_dir()) == []
    os.close(lock)


def test_waiting_costs_nothing(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000", replicas=3))
    supervisor = psutil.Process(apps.owner(app_id).supervisor.pid)

    def is_at_rest() -> bool:
        before = supervisor.num_ctx_switches().voluntary
        time.sleep(1.5)
        # The supervisor looks for the folder every three seconds; nobody polls.
        return supervisor.num_ctx_switches().voluntary - before < 15

    until(is_at_rest, "a supervisor that has started and that nothing wakes")
    apps.scheduler.apps.cancel(app_id, 0)
    apps.wait(app_id)
