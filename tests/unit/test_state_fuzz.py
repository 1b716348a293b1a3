# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Any content of any file of the state directory: it may cost its app's details, and nothing else.

About 550 cases, and 5,500 under ``--hypothesis-profile nightly``.

One app runs, as far as a test needs it to: a process in its supervisor's place notes each wish to end it. Another has
ended. Each case replaces one file of the first, asks everything that a user may ask, and cancels.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus, Role

from tests.unit.damage import contents
from torchx_monarch.backends.core import client_credentials, state_files
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local import owners, prune, status, submit
from torchx_monarch.backends.local.render import render
from torchx_monarch.client.allocations import list_allocations
from torchx_monarch.client.target import Target
from torchx_monarch.command.command import HOSTS_MODULE
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.insight import events
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_local
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.system import processes

FILES = [
    *("app.json", "request.json", "status.json", "supervisor.json", "cancel.json", "events.jsonl", "reserve"),
    *("combined.log", "combined.log.idx", "error.json", "certificate"),
]

_SUPERVISOR = """
import os, signal, sys
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"."))
os.write(1, b"ready")
while True:
    signal.pause()
"""


class RunningApp:
    """An app whose folder is real and whose supervisor is a stand-in that notes each SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self.scheduler: MonarchScheduler = monarch_local("torchx")
        self.runner = Runner("torchx", {"monarch_local": lambda session_name, **_: self.scheduler})
        self.ended = self._publish("ended", State.SUCCEEDED)
        self.app_id = self._publish("running", State.RUNNING)
        self.paths = state_files.app_paths(self.app_id)
        script = folder / "backends" / "local" / "supervise.py"
        script.parent.mkdir(parents=True)
        script.write_text(_SUPERVISOR)
        self._process = subprocess.Popen([sys.executable, str(script), self.paths.root, "3"], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.supervisor = self._process.pid
        self._told = self._process.stdout.fileno()
        assert os.read(self._told, 5) == b"ready"
        self._fill()
        self.files = {path: path.read_bytes() for path in Path(self.paths.root).rglob("*") if path.is_file()}
        kept = Path(client_credentials.path("monarch_local", self.app_id))
        self.files[kept] = b""
        self.handle = f"monarch_local://torchx/{self.app_id}"

    def _publish(self, name: str, state: State) -> str:
        role = Role("r", image="", entrypoint="python", args=["-m", HOSTS_MODULE, "--", "torchrun", "x.py"])
        app = AppDef(name, [role], {"team": "a"})
        submitted = SubmittedApp(app, [RoleSpec("r", workload=WorkloadKind.SESSION)], {"grace": 5})
        request = render(app, submitted.roles, grace=5.0, assign_gpus=False, environ={})
        request = submit._publish(
            state_files.apps_dir(), request, submitted.to_json(), lambda folder: None, time.time()
        )
        paths = state_files.app_paths(request.app_id)
        record = status.load(paths)
        assert record is not None
        record.state = record.roles[0].replicas[0].state = state
        record.error = record.roles[0].replicas[0].error = '{"message": {"message": "boom", "extraInfo": {}}}'
        record.ended = time.time() if state.is_terminal else None
        state_files.write_json(paths.status, record.to_json())
        return request.app_id

    def _fill(self) -> None:
        mine, supervisor = processes.identity(os.getpid()), processes.identity(self._process.pid)
        assert mine is not None and supervisor is not None
        who = owners.Owners(owners.this_machine(), supervisor, supervisor)
        state_files.write_json(self.paths.supervisor, who.to_json())
        state_files.write_json(self.paths.cancel, {"grace": 1.5})
        events.append(self.paths.events, "rank_restart", "rank 0 failed", seconds=1.5, rank=0)
        logs = Path(self.paths.replica_logs("r", 0))
        (logs / "combined.log").write_bytes(b"one\ntwo\n")
        (logs / "combined.log.idx").write_bytes(bytes(16))
        (logs / "error.json").write_text('{"message": {"message": "boom", "extraInfo": {"timestamp": "1"}}}')

    def named(self, name: str) -> Path:
        """One of its files."""
        if name == "certificate":
            return Path(client_credentials.path("monarch_local", self.app_id))
        return next(path for path in self.files if path.name == name)

    def restore(self, path: Path) -> None:
        """Undo what a case has done: to one file, and by cancelling."""
        for changed in (path, Path(self.paths.cancel)):
            if content := self.files[changed]:
                changed.write_bytes(content)
            else:
                changed.unlink(missing_ok=True)

    def told(self) -> bool:
        """Whether its supervisor was told to end it since the last call."""
        if not select.select([self._told], [], [], 60.0)[0]:
            return False
        return bool(os.read(self._told, 4096))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_STATE_DIR", str(folder / "state"))
        patch.setenv("TMPDIR", str(folder))
        app = RunningApp(folder)
        # Looks for its supervisor then need not read the command line of every process of the machine.
        patch.setattr(processes, "_pids", lambda: [os.getpid(), app.supervisor])
        yield app
        app.close()


@pytest.fixture(autouse=True)
def in_its_state_dir(app: RunningApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(Path(app.paths.root).parents[1]))


def ask_everything(app: RunningApp) -> None:
    """All that a user may ask about the app; nothing of it may raise anything but a message for that user."""
    apps = app.scheduler.list()
    listed = {each.app_id: each.state for each in apps}
    assert listed[app.ended] is AppState.SUCCEEDED
    assert app.app_id in listed
    found = app.scheduler.describe(app.app_id)
    assert found is not None
    shown = AppStatus(
        found.state, found.num_restarts, found.msg, found.structured_error_msg, None, found.roles_statuses
    )
    for text in (shown.format(), repr(shown), *(each.name for each in apps)):
        text.encode()  # a terminal can show it
        assert "\x1b" not in text and "\x00" not in text
    json.dumps(shown.to_json())
    app.scheduler.describe_native(app.app_id)
    now = datetime.now()
    for since in (None, now - timedelta(days=1)):
        with contextlib.suppress(ValueError):  # the roles may have gone
            list(app.scheduler.log_iter(app.app_id, "r", 0, since=since, until=now))
    app.scheduler._foreground._show(app.app_id)
    app.scheduler.apps.wait(app.app_id, 0.0)
    list(list_allocations())
    with contextlib.suppress(UnreachableError):
        Target.of(app.handle)
    prune.prune(os.path.dirname(app.paths.root))


@pytest.mark.parametrize("ended", [None, 1e9])
def test_app_whose_supervisor_lives_runs_and_can_be_cancelled(app: RunningApp, ended: float | None) -> None:
    path = Path(app.paths.status)
    record = json.loads(app.files[path])
    record["state"], record["ended"] = "SUCCEEDED", ended
    try:
        path.write_text(json.dumps(record))
        found = app.runner.status(app.handle)
        assert found is not None and found.state is AppState.RUNNING
        assert found.msg == f"{path} says SUCCEEDED, but the app runs: its supervisor is there"
        assert not app.scheduler.apps.wait(app.app_id, 0.0)
        assert prune.prune(os.path.dirname(app.paths.root)) == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app.scheduler.apps, "_await_end", lambda app: True)
            app.runner.cancel(app.handle)
        assert app.told()
        record["ended"] = time.time()  # as the supervisor writes it before it exits
        path.write_text(json.dumps(record))
        assert app.scheduler.apps.wait(app.app_id, 0.0)
    finally:
        app.restore(path)


@pytest.mark.parametrize("name", FILES)
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_content_of_any_file_costs_details_only(app: RunningApp, name: str, data: st.DataObject) -> None:
    path = app.named(name)
    content = data.draw(contents(app.files[path]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        ask_everything(app)
        if data.draw(st.sampled_from([True, False, False, False]), "whether it is cancelled"):
            app.scheduler.apps.cancel(app.app_id, None)
            assert app.told()
    finally:
        app.restore(path)
