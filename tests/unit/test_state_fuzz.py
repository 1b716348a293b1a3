# SPDX-License-Identifier: BSD-3-Clause
"""Any content of any file of the state directory: it may cost a message about its app, and nothing else.

About 700 cases, and 7,000 under ``--hypothesis-profile nightly``.

One app runs, as far as a test needs it to: this process holds its lock, and a process in its supervisor's place notes
each wish to end it. Another has ended. Each case replaces one file of the first, asks what a user may ask, with a
command of ``torchx monarch`` among it, and cancels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchx.specs import AppDef, AppState, AppStatus, Role

from tests.unit.damage import contents
from tests.waits import WITHIN
from torchx_monarch.backends.core import client_credentials, state_files
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local import state, status, submit
from torchx_monarch.backends.local.folder import prune
from torchx_monarch.backends.local.render import render
from torchx_monarch.cli import exit_codes, main
from torchx_monarch.cli.run_output import _to_json, summary_of
from torchx_monarch.client.allocations import list_allocations
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.run import Collector
from torchx_monarch.client.runs import follow_run, list_runs
from torchx_monarch.client.target import Target
from torchx_monarch.command.command import HOSTS_MODULE
from torchx_monarch.exceptions import AllocationError, UnreachableError
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_local
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.system import processes

FILES = [
    *("app.json", "request.json", "status.json", "supervisor.json", "cancel.json", "events.jsonl", "reserve"),
    *("combined.log", "combined.log.idx", "error.json", "certificate", "samples.jsonl", "journal.jsonl"),
]

EVENTS: list[dict[str, Any]] = [
    {"kind": "submitted", "message": "submitted as a", "seconds": 0.5},
    {"kind": "hosts", "message": "hosts 1/1", "role": "r", "seconds": 0.5},
    {
        "kind": "ranks",
        "message": "ranks 1/1",
        "role": "r",
        "attempt": 0,
        "hosts": [{"replica": 0, "imported": [1001.0, 1002.0], "first_rank": 0, "pids": [7]}],
    },
    {"kind": "spares", "message": "spare: host 1 (a, pid 9)", "role": "r"},
    {"kind": "excluded", "message": "host 1 (a) is excluded: it was lost", "role": "r"},
    {"kind": "hang", "message": "hang: rank 0 waits", "role": "r", "waited": 1.5},
    {"kind": "failure", "message": "rank 0 exited with code 1", "role": "r", "rank": 0, "failed_at": 1003.5},
    {
        "kind": "attempt_end",
        "message": "attempt 0",
        "role": "r",
        "exits": [{"rank": 0, "code": 1, "started": 1001.5, "ended": 1003.5, "grouped": 1002.0, "secondary": False}],
    },
    {"kind": "rank_restart", "message": "restart 1 of 2 after: rank 0 failed", "role": "r", "seconds": 1.5, "code": 1},
    {"kind": "run", "message": "run 1: torchrun x.py", "role": "r", "run": 1},
    {"kind": "run_end", "message": "run 1 FAILED: rank 0 failed", "role": "r", "run": 1, "code": 1},
    {"kind": "cancel", "message": "cancelled"},
]

JOURNAL: list[dict[str, Any]] = [
    {"type": "run", "run": 1, "command": "x.py", "cwd": "/w", "code": "ab", "by": "me@here", "submitted": 7.0},
    {"type": "phase", "text": "ranks 1/1"},
    {"type": "output", "rank": 0, "stream": "stdout", "text": "[r0]:out\n"},
    {"type": "attempts", "count": 1},
    {"type": "exit", "exit": RankExit(0, 0, 0, "a", 7, 1, 12.0, error={"message": "boom"}).to_json()},
    {
        "type": "result",
        "run": 1,
        "exit_code": 1,
        "reason": "rank 0 failed",
        "stopped": False,
        "cause": 0,
        "started": 10.0,
        "seconds": 2.0,
        "code": "ab",
    },
]

COMMANDS = [
    *("status HANDLE", "status --json HANDLE", "logs HANDLE", "logs --timestamps HANDLE", "logs --json HANDLE"),
    *("report -o FILE HANDLE", "trace -o FILE HANDLE", "metrics HANDLE", "metrics --json HANDLE"),
    *("ls", "ls --json", "ps", "status running"),
]
"""The commands of ``torchx monarch`` that read the files."""

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
        self.ended, lock = self._publish("ended", State.SUCCEEDED)
        os.close(lock)
        self.app_id, self._lock = self._publish("running", State.RUNNING)
        self.paths = state_files.app_paths(self.app_id)
        self._process = subprocess.Popen([sys.executable, "-c", _SUPERVISOR], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.supervisor = self._process.pid
        self._told = self._process.stdout.fileno()
        assert os.read(self._told, 5) == b"ready"
        self._fill()
        self.files = {path: path.read_bytes() for path in Path(self.paths.root).rglob("*") if path.is_file()}
        kept = Path(client_credentials.path("monarch_local", self.app_id))
        self.files[kept] = b""
        self.handle = f"monarch_local://torchx/{self.app_id}"
        # Waits for the end, which the stand-in does not bring about.
        self.scheduler.apps._await_end = lambda app: True

    def _publish(self, name: str, state: State) -> tuple[str, int]:
        role = Role("r", image="", entrypoint="python", args=["-m", HOSTS_MODULE, "--", "torchrun", "x.py"])
        app = AppDef(name, [role], {"team": "a"})
        submitted = SubmittedApp(app, [RoleSpec("r", workload=WorkloadKind.SESSION)], {"grace": 5})
        request = render(app, submitted.roles, grace=5.0, assign_gpus=False, environ={})
        apps = state_files.apps_dir()
        request, lock = submit._publish(apps, request, submitted.to_json(), lambda folder: None, time.time())
        paths = state_files.app_paths(request.app_id)
        record = status.load(paths)
        assert record is not None
        record.state = record.roles[0].replicas[0].state = state
        record.error = record.roles[0].replicas[0].error = '{"message": {"message": "boom", "extraInfo": {}}}'
        record.ended = time.time() if state.is_terminal else None
        state_files.write_json(paths.status, record.to_json())
        return request.app_id, lock

    def _fill(self) -> None:
        mine, supervisor = processes.identity(os.getpid()), processes.identity(self._process.pid)
        assert mine is not None and supervisor is not None
        who = state.Owners(os.uname().nodename, supervisor, supervisor)
        state_files.write_json(self.paths.supervisor, who.to_json())
        state_files.write_json(self.paths.cancel, {"grace": 1.5})
        lines = [json.dumps({"time": 1000.0 + at, **event}) for at, event in enumerate(EVENTS)]
        Path(self.paths.events).write_text("\n".join(lines) + "\n")
        logs = Path(self.paths.replica_logs("r", 0))
        (logs / "samples.jsonl").write_text(
            "".join(f'{{"time": {at}, "attempt": 0, "ranks": [[0, {at - 1000}, 9, 9]]}}\n' for at in (1003, 1004, 1005))
        )
        (logs / "run_1").mkdir()
        (logs / "run_1" / "journal.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in JOURNAL))
        (logs / "combined.log").write_bytes(b"one\ntwo\n")
        (logs / "combined.log.idx").write_bytes(bytes(16))
        (logs / "error.json").write_text('{"message": {"message": "boom", "extraInfo": {"timestamp": "1"}}}')

    def named(self, name: str) -> Path:
        """One of its files."""
        if name == "certificate":
            return Path(client_credentials.path("monarch_local", self.app_id))
        return next(path for path in self.files if path.name == name)

    def original(self, path: Path) -> bytes:
        """The sound content of one of its files; the case of a certificate that is there is drawn only for itself."""
        stored = {"name": "running", "credentials": "e30=", "rendezvous": {"r": "tls:127.0.0.1:1"}}
        return self.files[path] or json.dumps(stored).encode()

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
        os.close(self._lock)
        self._process.kill()
        self._process.communicate(timeout=WITHIN)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_STATE_DIR", str(folder / "state"))
        patch.setenv("TMPDIR", str(folder))
        app = RunningApp(folder)
        # The processes of an app are then looked for among these alone.
        patch.setattr(processes, "_pids", lambda: [os.getpid(), app.supervisor])
        patch.setattr("torchx.schedulers.get_scheduler_factories", lambda: {"monarch_local": lambda _: app.scheduler})
        yield app
        app.close()


@pytest.fixture(autouse=True)
def in_its_state_dir(app: RunningApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(Path(app.paths.root).parents[1]))


def ask_everything(app: RunningApp, changed: str = "") -> None:
    """All that a user may ask about the app; nothing of it may raise anything but a message for that user."""
    apps = app.scheduler.list()
    listed = {each.app_id: each.state for each in apps}
    assert listed[app.ended] is AppState.SUCCEEDED
    if changed not in ("status.json", "app.json"):  # it may say that the app has ended, or be damaged
        assert listed[app.app_id] not in (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)
    with contextlib.suppress(BackendError):
        found = app.scheduler.describe(app.app_id)
        assert found is not None
        shown = AppStatus(
            found.state, found.num_restarts, found.msg, found.structured_error_msg, None, found.roles_statuses
        )
        for text in (shown.format(), repr(shown), *(each.name for each in apps)):
            text.encode()  # a terminal can show it
            assert "\x1b" not in text and "\x00" not in text
        json.dumps(shown.to_json())
    with contextlib.suppress(BackendError):
        app.scheduler.describe_native(app.app_id)
    now = datetime.now()
    for since in (None, now - timedelta(days=1)):
        with contextlib.suppress(ValueError):  # the roles may have gone
            list(app.scheduler.log_iter(app.app_id, "r", 0, since=since, until=now))
    app.scheduler._foreground._offsets.clear()
    app.scheduler._foreground._show(app.app_id)
    app.scheduler.apps.wait(app.app_id, 0.0)
    list(list_allocations())
    with contextlib.suppress(UnreachableError):
        Target.of(app.handle)
    prune(os.path.dirname(app.paths.root))


def ask_command(app: RunningApp, words: str) -> bool:
    """Run a command of ``torchx monarch``, whose output must be UTF-8; return whether its exit code is 0."""
    parser = argparse.ArgumentParser()
    output = os.path.join(os.path.dirname(app.paths.root), "..", "output")
    name, *rest = [{"HANDLE": app.handle, "FILE": output}.get(word, word) for word in words.split()]
    main.load(name).add_arguments(parser)
    args = argparse.Namespace(sub_command=name, **vars(parser.parse_args(rest)))
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as screen, contextlib.redirect_stdout(screen):
        try:
            main.CmdMonarch.run(main.CmdMonarch.__new__(main.CmdMonarch), args)
        except SystemExit as error:
            assert error.code in (exit_codes.USAGE, exit_codes.UNKNOWN_APP, exit_codes.UNAVAILABLE)
            return False
        screen.flush()
        assert b"\x1b" not in screen.buffer.getvalue()
        return True


class EndedHosts:
    """Stands in for ``client.hosts.Hosts`` of an allocation that has ended."""

    end_reason = "has ended (SUCCEEDED)"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def log_folder(self) -> Path:
        return self._folder

    def open(self, greeting: dict[str, Any], ready: bool = False) -> None:
        raise AllocationError("has ended")


def ask_kept_run(app: RunningApp) -> None:
    """List and follow the run that is kept."""
    hosts = cast(Hosts, EndedHosts(Path(app.paths.replica_logs("r", 0))))
    [info] = list_runs(hosts)
    json.dumps(info)
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as screen, contextlib.redirect_stdout(screen):
        result = Collector("stream").collect(follow_run(hosts, 1))
    summary_of(app.handle, result).lines()
    json.dumps(_to_json(result))


def test_sound_files_are_read(app: RunningApp) -> None:
    ask_everything(app)
    ask_kept_run(app)
    assert all(ask_command(app, words) for words in COMMANDS)


def test_an_app_whose_supervisor_lives_can_be_cancelled_whatever_its_status_says(app: RunningApp) -> None:
    path = Path(app.paths.status)
    try:
        path.write_text(json.dumps({**json.loads(app.files[path]), "state": "SUCCEEDED", "ended": 1e9}))
        assert prune(os.path.dirname(app.paths.root)) == []
        app.scheduler.cancel(app.app_id)
        assert app.told()
    finally:
        app.restore(path)


@pytest.mark.parametrize("name", FILES)
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_content_of_any_file_costs_details_only(app: RunningApp, name: str, data: st.DataObject) -> None:
    path = app.named(name)
    content = data.draw(contents(app.original(path)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        ask_everything(app, name)
        ask_command(app, data.draw(st.sampled_from(COMMANDS), "a command"))
        if name == "journal.jsonl":
            ask_kept_run(app)
        if data.draw(st.sampled_from([True, False, False, False]), "whether it is cancelled"):
            app.scheduler.cancel(app.app_id)
            if name != "supervisor.json":  # a supervisor that is not known reads the request from disk
                assert app.told()
    finally:
        app.restore(path)
