# SPDX-License-Identifier: BSD-3-Clause
"""What a job leaves on disk is its user's alone, however careless the user's umask."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, Role

from tests.local.hosts import Hosts
from tests.waits import WITHIN, until
from torchx_monarch.schedulers import monarch_local
from torchx_monarch.transport import credentials

_PROGRAM = """
import os, sys, time
with open(sys.argv[1] + os.environ["RANK"] + ".new", "w") as file:
    print(*os.environ.items(), sep="\\n", file=file)
os.rename(file.name, file.name[:-4])
while not os.path.exists(sys.argv[1] + "go"):
    time.sleep(0.05)
raise ValueError("boom")
"""


def open_to_others(folder: Path) -> list[str]:
    """Files and folders that others of the machine may do something with."""
    found = []
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # a supervisor writes a file under another name first
            mode = path.lstat().st_mode
            found += [f"{stat.filemode(mode)} {path}"] if mode & 0o077 and not stat.S_ISLNK(mode) else []
    return found


def test_nothing_of_a_job_is_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = f"tm{uuid.uuid4().hex[:8]}"  # Monarch would log to /tmp/USER/monarch_log.log
    monkeypatch.setenv("USER", user)
    secret = credentials.create()[0].to_text()
    monkeypatch.setenv("MONARCH_CREDENTIALS", secret)  # of another job, from which this one is submitted
    made = tmp_path / "made"
    state = Path(os.environ["MONARCH_STATE_DIR"])
    before = os.umask(0)
    try:
        with Runner("t", {"monarch_local": monarch_local}) as runner:
            script = tmp_path / "prog.py"
            script.write_text(_PROGRAM)
            args = ["--nnodes", "2", "--nproc-per-node", "1", str(script), str(made)]
            role = Role("r", image="", entrypoint="torchrun", args=args, num_replicas=2)
            app = AppDef("app", [role])
            assert secret not in str(runner.dryrun(app, "monarch_local", cfg={"preload": "none"}))
            handle = runner.run(app, "monarch_local", cfg={"preload": "none"})
            until(lambda: all(Path(f"{made}{rank}").exists() for rank in (0, 1)), "the ranks")
            assert not (during := open_to_others(state)), during
            Path(f"{made}go").touch()
            runner.wait(handle, wait_interval=0.2)
    finally:
        os.umask(before)
    until(lambda: not [*state.glob("apps/*/reserve")], "the supervisor to leave the folder")
    assert len(list(state.rglob("error.json"))) >= 3, "of the hosts and of a rank at least"
    assert not (after := open_to_others(state)), after
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_text(errors="replace")]
    # But what the program makes is as its user wants it.
    assert stat.S_IMODE(Path(f"{made}0").stat().st_mode) == 0o666
    assert not Path("/tmp", user).exists()
    assert not [path for path in Path("/tmp").glob("*") if user in path.name]


_CLIENT = """
from torchx_monarch import MonarchJob
job = MonarchJob({"trainers": 1})
job.state().trainers.spawn_procs().initialized.get(timeout=240)
job.kill()
"""

_RANK = """
import monarch.actor
monarch.actor.this_host().spawn_procs().initialized.get(timeout=240)
"""

_CONTROLLER = """
import monarch.actor
from torchx_monarch import this_job
this_job().state().trainer.spawn_procs().initialized.get(timeout=240)
"""


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs a mount namespace")
@pytest.mark.parametrize("who", ["client", "controller", "rank"])
def test_monarchs_log_is_not_written_through_another_users_link(tmp_path: Path, folder: Path, who: str) -> None:
    planted, victim = tmp_path / "planted", tmp_path / "victim"
    planted.mkdir()
    victim.write_text("mine")
    for name in ("monarch_log.log", "monarch_log_mine.log"):
        (planted / name).symlink_to(victim)
    usual = Path("/tmp", pwd.getpwuid(os.getuid()).pw_name)  # of all processes of this user: replaced for ours alone
    usual.mkdir(exist_ok=True)
    within = ("unshare", "--mount", "sh", "-c", f'mount --bind {planted} {usual} && exec "$@"', "sh")
    program = tmp_path / "program.py"
    program.write_text({"client": _CLIENT, "controller": _CONTROLLER, "rank": _RANK}[who])
    if who == "client":
        subprocess.run([*within, sys.executable, str(program)], cwd=tmp_path, timeout=WITHIN, check=True)
    else:
        actors = ["python", "-m", "torchx_monarch.actors", "--", "python"]
        command = [*(actors if who == "controller" else ["torchrun"]), str(program)]
        environ = {"MONARCH_LOG_SUFFIX": "mine"}
        hosts = Hosts(folder, command, options=("--preload", ""), wrapper=within, environ=environ).start()
        assert hosts.wait(300) == [0], hosts.err()
    assert victim.read_text() == "mine"
    assert all(path.is_symlink() for path in planted.iterdir())
