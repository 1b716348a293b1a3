# SPDX-License-Identifier: BSD-3-Clause
"""Cancelling an app."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState

from tests.local.detached import Detached, fresh, lives, pid_in, py, sh
from tests.waits import until
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.local import folder
from torchx_monarch.model.state import State

NEVER = 1000
"""A grace period in seconds that no test waits for."""

#: Says when it is up and which signals it gets; ends on none of them.
STUBBORN = """
import os, signal, sys, time
folder = sys.argv[1]
def got(signum, frame):
    with open(f"{folder}/got-{os.getpid()}", "a") as file:
        file.write(f"{signum}\\n")
signal.signal(signal.SIGTERM, got)
if len(sys.argv) > 2 and os.fork() == 0:
    name = "child"
else:
    name = "main"
with open(f"{folder}/{name}", "w") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(0.1)
"""


def got(folder: Path, name: str) -> list[str]:
    path = folder / f"got-{pid_in(folder / name)}"
    return path.read_text().split() if path.exists() else []


def test_cancel_while_the_supervisor_starts(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def start_and_cancel(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        process = start(command, **more)
        folder.request_stop(state_files.AppPaths(command[5]), Outcome(State.CANCELLED), None)
        return process

    with monkeypatch.context() as within:
        within.setattr(subprocess, "Popen", start_and_cancel)
        app_id = apps.run(sh("sleep 1000"))
    assert apps.wait(app_id).state is AppState.CANCELLED


def test_a_program_that_will_not_end(apps: Detached, tmp_path: Path) -> None:
    app_id = apps.run(py(STUBBORN, str(tmp_path), "fork"))  # time for both to say that they were told
    until(lambda: pid_in(tmp_path / "main") and pid_in(tmp_path / "child"), "the start")
    fresh(f"runner.cancel(handle({app_id!r}))")
    assert apps.wait(app_id).state is AppState.CANCELLED
    assert got(tmp_path, "main") == ["15"] and got(tmp_path, "child") == ["15"], "each is told once"
    assert not lives(pid_in(tmp_path / "main")) and not lives(pid_in(tmp_path / "child"))
    assert apps.record(app_id)["roles"][0]["replicas"][0]["exit_code"] == -9
    assert apps.states(app_id) == {"r/0": AppState.CANCELLED}


def test_replicas_are_stopped_side_by_side(apps: Detached, tmp_path: Path) -> None:
    # Each ends when all of them have been told.
    ends = f"while ! test $(wc -c < {tmp_path}/told) = 8; do sleep 0.05; done; exit 0"
    trap = f"trap 'echo x >> {tmp_path}/told; {ends}' TERM"
    command = f"{trap}; echo x >> {tmp_path}/up; while true; do sleep 0.05; done"
    app_id = apps.run(sh(command, replicas=4), grace=NEVER)
    until(lambda: (tmp_path / "up").exists() and len((tmp_path / "up").read_text()) == 8, "the start")
    apps.scheduler.cancel(app_id)
    assert apps.wait(app_id).state is AppState.CANCELLED


def test_a_second_cancel_is_harmless_and_a_shorter_grace_counts(apps: Detached, tmp_path: Path) -> None:
    app_id = apps.run(py(STUBBORN, str(tmp_path)), grace=NEVER)
    until(lambda: pid_in(tmp_path / "main"), "the start")
    for seconds in (None, 1e300, None):
        apps.scheduler.apps.cancel(app_id, seconds)
    until(lambda: got(tmp_path, "main"), "the signal")
    assert not apps.scheduler.apps.wait(app_id, 0.3)
    assert got(tmp_path, "main") == ["15"]
    apps.scheduler.apps.cancel(app_id, 0.5)
    assert apps.wait(app_id).state is AppState.CANCELLED


def fake_host(folder: Path) -> list[str]:
    """The command, to be run in the folder, of a host that ends on no signal, and does not even tell its child."""
    package = folder / "torchx_monarch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "host.py").write_text(STUBBORN)
    return [sys.executable, "-X", "faulthandler", "-m", "torchx_monarch.host", str(folder)]


def test_only_the_host_is_told(apps: Detached, tmp_path: Path) -> None:
    # A set-up script, or a `bash -c` as dist.ddp has it: the host is not the replica's own process.
    shell = sh('"$@"; echo done')
    shell.args += ["sh", *fake_host(tmp_path), "fork"]
    shell.image = str(tmp_path)
    app_id = apps.run(shell, grace=NEVER)
    until(lambda: pid_in(tmp_path / "main") and pid_in(tmp_path / "child"), "the start")
    assert pid_in(tmp_path / "main") != apps.record(app_id)["roles"][0]["replicas"][0]["pid"]
    apps.scheduler.apps.cancel(app_id, None)
    until(lambda: got(tmp_path, "main"), "the signal")
    assert not apps.scheduler.apps.wait(app_id, 0.3)
    assert got(tmp_path, "child") == []
    apps.scheduler.apps.cancel(app_id, 0)
    apps.wait(app_id)
    assert not lives(pid_in(tmp_path / "child"))


def test_a_supervisor_that_was_stopped(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000"))
    os.kill(apps.owner(app_id).supervisor.pid, signal.SIGSTOP)
    apps.scheduler.cancel(app_id)
    assert apps.wait(app_id).state is AppState.CANCELLED


def test_signals_of_a_terminal_are_ignored(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000"))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        os.kill(apps.owner(app_id).supervisor.pid, number)
    assert not apps.scheduler.apps.wait(app_id, 0.2)
    apps.scheduler.apps.cancel(app_id, 0)
    apps.wait(app_id)


def test_the_machine_shuts_down(apps: Detached, tmp_path: Path) -> None:
    app_id = apps.run(sh(f"trap 'echo bye; exit 0' TERM; touch {tmp_path}/up; while true; do sleep 0.05; done"))
    until(lambda: (tmp_path / "up").exists(), "the start")
    os.kill(apps.owner(app_id).supervisor.pid, signal.SIGTERM)
    status = apps.wait(app_id)
    assert status.state is AppState.CANCELLED
    assert "SIGTERM" in status.msg


STARTED = """
import os, signal, sys
sys.path.append({root!r})
from torchx_monarch.backends.local import folder, supervisor
write_owner = folder.write_owner
def write_and_signal(paths):
    write_owner(paths)
    os.kill(os.getpid(), signal.SIGTERM)
folder.write_owner = write_and_signal
supervisor.main(*sys.argv[2:])
"""
"""Starts a supervisor that gets SIGTERM as soon as others can know its pid."""


def test_the_machine_shuts_down_while_the_supervisor_starts(
    apps: Detached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, program = subprocess.Popen, tmp_path / "start.py"
    program.write_text(STARTED.format(root=str(Path(folder.__file__).parents[3])))
    with monkeypatch.context() as within:
        within.setattr(subprocess, "Popen", lambda words, **more: start([*words[:3], str(program), *words[4:]], **more))
        app_id = apps.run(sh("sleep 1000"))
    status = apps.wait(app_id)
    assert status.state is AppState.CANCELLED
    assert "SIGTERM" in status.msg
