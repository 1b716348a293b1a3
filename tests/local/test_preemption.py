# SPDX-License-Identifier: BSD-3-Clause
"""A SIGTERM from outside is a preemption; ours is not. Neither is lost, and neither is taken for something else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus, Role

from tests.local.hosts import Hosts
from tests.waits import WITHIN
from torchx_monarch.backends.core import state_files
from torchx_monarch.schedulers import monarch_local
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.system import processes

Eventually = Callable[..., object]

#: Ranks that end by themselves are not waited for any longer.
NO_PRELOAD = ("--grace", "60", "--preload", "")

#: Takes its time to end when it is told.
CLEANS_UP = """
def stop(*_):
    os.write(1, f"told {rank}\\n".encode())  # print is not reentrant: that of the pid may not have returned
    time.sleep(1.5)
    os.write(1, f"clean {rank}\\n".encode())
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("pid", os.getpid(), flush=True)
time.sleep(1000)
"""


def torchrun(script: str, nnodes: int = 2, nproc: int = 2, restarts: int = 0) -> list[str]:
    options = ["--nnodes", str(nnodes), "--nproc-per-node", str(nproc), "--max-restarts", str(restarts)]
    return ["torchrun", *options, "--tee", "3", script]


def started(hosts: Hosts, ranks: int, eventually: Eventually) -> Hosts:
    eventually(lambda: len(hosts.rank_pids()) == ranks, "the ranks")
    eventually(lambda: any(event["kind"] == "output" for event in hosts.events()), "the report of it")
    return hosts


@pytest.mark.parametrize("replica", [0, 1])
def test_the_ranks_of_all_hosts_have_the_whole_grace(
    folder: Path, script: Callable[[str], str], eventually: Eventually, replica: int
) -> None:
    hosts = Hosts(folder, torchrun(script(CLEANS_UP)), replicas=2, options=NO_PRELOAD).start()
    started(hosts, 4, eventually).processes[replica].terminate()
    assert hosts.wait() == [143, 143]
    text = hosts.out(0) + hosts.out(1)
    assert text.count("told") == text.count("clean") == 4
    said = f"preempted or cancelled: host {replica} ("
    assert f"STOPPED: {said}" in hosts.err(0).splitlines()[-1]
    assert [event["message"] for event in hosts.events() if event["kind"] == "preempted"][0].startswith(said)
    error = json.loads((hosts.logs(1 - replica) / "error.json").read_text())["message"]
    assert error["errorCode"] == 143 and error["message"].startswith(said)


def test_before_the_job_began(folder: Path, script: Callable[[str], str], eventually: Eventually) -> None:
    hosts = Hosts(folder, torchrun(script("")), replicas=2, options=NO_PRELOAD).start(1)
    log = hosts.logs(1) / "monarch.log"
    eventually(log.exists, "the host's own log")
    eventually(lambda: "waiting for replica 0" in hosts.err(1), "the host to look for replica 0")
    hosts.processes[1].terminate()
    assert hosts.wait() == [143]
    error = json.loads((hosts.logs(1) / "error.json").read_text())["message"]
    assert error["message"].startswith("preempted or cancelled: host 1 (")


def test_while_interpreters_import(
    folder: Path, tmp_path: Path, script: Callable[[str], str], eventually: Eventually
) -> None:
    # The mesh is there and no rank was started: nobody has anything to stop, and nobody waits for that.
    (tmp_path / "heavy.py").write_text("import time; time.sleep(1000)")
    options = ("--grace", "1000", "--preload", "heavy")
    hosts = Hosts(folder, torchrun(script("")), replicas=2, options=options).start()
    eventually(lambda: any(event["kind"] == "hosts" for event in hosts.events()), "the hosts")
    hosts.processes[1].terminate()
    assert hosts.wait() == [143, 143]


def test_while_a_failed_attempt_is_stopped(folder: Path, script: Callable[[str], str], eventually: Eventually) -> None:
    path = script("""
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n") and time.sleep(1.5) or sys.exit(0))
            print("pid", os.getpid(), flush=True)
            time.sleep(1000)
        while not os.path.exists(f"{sys.argv[0]}.go"):
            time.sleep(0.02)
        sys.exit(3)
    """)
    hosts = Hosts(folder, torchrun(path, nnodes=1, restarts=5), options=NO_PRELOAD).start()
    started(hosts, 1, eventually)
    Path(f"{path}.go").touch()
    eventually(lambda: "told" in hosts.out(), "the end of the attempt to begin")
    hosts.processes[0].terminate()
    assert hosts.wait() == [143], hosts.err()
    assert "preempted or cancelled: host 0 (" in hosts.err().splitlines()[-1]
    assert not (hosts.logs(0) / "attempt_1").exists()


def test_while_a_lost_host_is_being_replaced(
    folder: Path, script: Callable[[str], str], eventually: Eventually
) -> None:
    # Nobody waits for the one that is gone: the grace is longer than the test.
    options = ("--grace", "1000", "--preload", "", "--replacements", "1")
    hosts = Hosts(folder, torchrun(script(CLEANS_UP)), replicas=2, options=options).start()
    started(hosts, 4, eventually).processes[1].kill()
    eventually(lambda: any(event["kind"] == "replacement" for event in hosts.events()), "the loss to be noticed")
    hosts.processes[0].terminate()
    assert hosts.wait() == [143, -9]
    for left in folder.glob("h*/"):  # of the host that was killed
        shutil.rmtree(left)


class Job:
    """An app on monarch_local, through TorchX's Runner."""

    def __init__(self, script: str, grace: int = 60, **role: object) -> None:
        self._runner = Runner("torchx", {"monarch_local": monarch_local})
        command = torchrun(script)
        app = AppDef("a", [Role("r", image="", entrypoint=command[0], args=command[1:], num_replicas=2, **role)])
        self.handle: str = self._runner.run(app, "monarch_local", cfg={"preload": "none", "grace": grace})
        self.paths = state_files.app_paths(self.handle.rpartition("/")[2])
        self.marker = str((state_files.load_undamaged(dict, self.paths.request) or {})["job"])

    @property
    def scheduler(self) -> MonarchScheduler:
        inner: MonarchScheduler = self._runner._scheduler("monarch_local")
        return inner

    def text(self) -> str:
        """All logs and events."""
        paths = [*Path(self.paths.logs).rglob("combined.log"), Path(self.paths.events)]
        return "".join(path.read_text() for path in paths)

    def pid(self, replica: int) -> int:
        """Of a host."""
        record = state_files.load_undamaged(dict, self.paths.status) or {}
        return int(record["roles"][0]["replicas"][replica]["pid"])

    def cancel(self) -> None:
        self._runner.cancel(self.handle)

    def wait(self) -> AppStatus:
        assert self.scheduler.apps.wait(self.paths.app_id, WITHIN), self.text()
        return self._runner.status(self.handle)


def test_a_cancelled_job_is_not_preempted(script: Callable[[str], str], eventually: Eventually) -> None:
    job = Job(script(CLEANS_UP))
    eventually(lambda: job.text().count("]:pid") == 4, "the ranks")
    job.cancel()
    status = job.wait()
    assert (status.state, status.msg) == (AppState.CANCELLED, "cancelled")
    text = job.text()
    assert "preempt" not in text and "was told to stop" in text
    assert text.count("]:clean") == 4


def test_a_job_whose_folder_is_removed_is_stopped(script: Callable[[str], str], eventually: Eventually) -> None:
    job = Job(script(CLEANS_UP))
    eventually(lambda: job.text().count("]:pid") == 4, "the ranks")

    def is_removed() -> bool:
        shutil.rmtree(job.paths.root, ignore_errors=True)  # where the job makes a file meanwhile, once more
        return not os.path.exists(job.paths.root)

    eventually(is_removed, "the end of the folder")
    eventually(lambda: not processes.marked(job.marker), "the end of all its processes")
    assert not os.path.exists(job.paths.root)
