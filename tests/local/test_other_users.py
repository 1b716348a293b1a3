# SPDX-License-Identifier: BSD-3-Clause
"""Other users of the machine cannot reach a job by the sockets that Monarch opens for all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.local.hosts import Hosts
from tests.local.other_user import AS_OTHER_USER, abstract_sockets, requires_other_user
from tests.ports import free_port
from tests.waits import until
from torchx_monarch.transport import credentials

pytestmark = requires_other_user

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
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                states.add(stat.read_text().rpartition(")")[2].split()[0])
        time.sleep(0.01)
    return states == {"S"}


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=240)[0].strip()


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
