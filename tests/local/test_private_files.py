# SPDX-License-Identifier: BSD-3-Clause
"""What a job leaves on disk, and the sockets that Monarch opens for all, are its user's alone."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, Role

from tests.local.hosts import Hosts
from tests.local.other_user import AS_OTHER_USER, abstract_sockets, requires_other_user
from tests.ports import free_port
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


_KNOCKS = 2000

_NIGHTLY = pytest.mark.nightly("as with 0.7.99")

_WAITS = """
from torchx_monarch import this_job
job = this_job()
print('up', flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.05)
"""

Start = Callable[..., Hosts]


@pytest.fixture
def start(folder: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts two hosts, perhaps with a Monarch that says it is of another version; a script attaches to them, and waits
    for the file ``go`` in the folder."""
    monkeypatch.setenv("MONARCH_LOG_SUFFIX", "to-stderr" * 32)  # the intruder's Monarch leaves no log either
    monkeypatch.setenv("USER", Path(os.environ["TMPDIR"]).name)  # but makes a folder /tmp/USER for it

    def run(scheme: str = "unix", wrapper: tuple[str, ...] = (), monarch: str = "") -> Hosts:
        environ = {}
        if monarch:  # the first metadata on the path decides which version it is
            metadata = Path(os.environ["TMPDIR"], f"torchmonarch-{monarch}.dist-info", "METADATA")
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: torchmonarch\nVersion: {monarch}\n")
            environ["PYTHONPATH"] = os.environ["TMPDIR"]
        if scheme == "tls":
            hosts, _ = credentials.create()
            environ |= {"MONARCH_RENDEZVOUS": f"tls:127.0.0.1:{free_port()}", "MONARCH_CREDENTIALS": hosts.to_text()}
        command = ["python", "-m", "torchx_monarch.actors", "--", "python", script(_WAITS), str(folder / "go")]
        job = Hosts(folder, command, 2, ("--preload", ""), environ, wrapper).start()
        until(lambda: "up" in job.out() or job.processes[0].poll() is not None, "the script")
        return job

    theirs = Path(os.environ["TMPDIR"], "s")
    theirs.mkdir()
    theirs.chmod(0o777)
    yield run
    (folder / "go").touch()
    shutil.rmtree(theirs)


def worker_loop(job: Hosts) -> psutil.Process:
    """The process of host 0 in which Monarch's worker loop runs."""
    host = psutil.Process(job.processes[0].pid)
    (loop,) = [child for child in host.children() if "torchx_monarch.host.worker_loop_main" in child.cmdline()]
    return loop


def play(what: str, name: str, *more: str, other_user: bool = True) -> subprocess.Popen[str]:
    words = [*(AS_OTHER_USER if other_user else ()), sys.executable, "-m", "tests.local.other_user", what, name, *more]
    environ = {**os.environ, "TMPDIR": f"{os.environ['TMPDIR']}/s"}
    root = Path(__file__).parents[2]
    return subprocess.Popen(words, cwd=root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def sleeps(pid: int) -> bool:
    """Whether no thread of a process runs, or waits for a processor, at any of some moments."""
    states = set()
    for _ in range(20):
        for task in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                states.add(task.read_text().rpartition(")")[2].split()[0])
        time.sleep(0.01)
    return states == {"S"}


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=240)[0].strip()


@requires_other_user
@pytest.mark.parametrize(
    ("scheme", "monarch"),
    [("unix", "0.7.99"), pytest.param("unix", "", marks=_NIGHTLY), pytest.param("tls", "", marks=_NIGHTLY)],
)
def test_other_users_are_refused_and_disturb_nothing(start: Start, folder: Path, scheme: str, monarch: str) -> None:
    job = start(scheme, monarch=monarch)
    loop = worker_loop(job)
    names = abstract_sockets(loop.pid)
    assert names, "Monarch has no abstract sockets any more: the guard can go"
    host = psutil.Process(job.processes[0].pid)
    others = {process.pid: abstract_sockets(process.pid) for process in (host, *host.children(recursive=True))}
    del others[loop.pid]
    assert not any(others.values()), f"only the worker loop is guarded: {others}"

    before = loop.num_fds()
    for name in names:
        assert said(play("knock", name, str(_KNOCKS))) == f"{_KNOCKS} 0"
        assert said(play("knock", name, "1", other_user=False)) == "0 1"
    until(lambda: loop.num_fds() <= before, f"{before} descriptors")
    answers = [said(process) for process in [play("intrude", name) for name in names]]
    assert all(answer.startswith("refused TimeoutError") for answer in answers), answers  # it tries again and again
    until(lambda: sleeps(loop.pid), "the worker loop, which is busy with those that it has refused")

    assert job.processes[0].poll() is None
    (folder / "go").touch()
    assert job.wait() == [0, 0], job.err()
    assert "SUCCEEDED" in job.err()
    assert job.err().count("is not tested with Monarch 0.7.99") == job.err().count("INSECURE") == bool(monarch)


@requires_other_user
def test_a_host_that_cannot_refuse_others_says_so(start: Start, folder: Path) -> None:
    job = start(wrapper=("setarch", "i686"))  # a machine on which the guard does not know how
    said_so = [line for line in job.err().splitlines() if "INSECURE" in line]
    assert len(said_so) == 1, job.err()
    assert "host 0: INSECURE: the guard of Monarch's sockets is off (Monarch " in said_so[0]
    assert "not known how on i686, only on x86_64 and aarch64. Other users of this machine might" in said_so[0]
    names = abstract_sockets(worker_loop(job).pid)
    assert [said(play("knock", name, "1")) for name in names] == ["0 1"] * len(names) != []  # a guarded host closes it
    (folder / "go").touch()
    assert job.wait() == [0, 0], job.err()
