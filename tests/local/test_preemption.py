# SPDX-License-Identifier: BSD-3-Clause
"""A SIGTERM from outside is a preemption; ours is not. Neither is lost, and neither is taken for something else."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torchx.specs import AppState, Role

from tests.local.detached import Detached
from tests.local.hosts import Hosts, torchrun
from tests.waits import until
from torchx_monarch.backends.core import state_files
from torchx_monarch.system import processes

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


def started(hosts: Hosts, ranks: int) -> Hosts:
    until(lambda: len(hosts.rank_pids()) == ranks, "the ranks")
    until(lambda: any(event["kind"] == "output" for event in hosts.events()), "the report of it")
    return hosts


def test_the_ranks_of_all_hosts_have_the_whole_grace(folder: Path, script: Callable[[str], str]) -> None:
    """Also those of the controller's own host; the contract preempts the other one."""
    hosts = Hosts(folder, torchrun(script(CLEANS_UP), nnodes=2), replicas=2, options=NO_PRELOAD).start()
    started(hosts, 4).processes[0].terminate()
    assert hosts.wait() == [143, 143]
    text = hosts.out(0) + hosts.out(1)
    assert text.count("told") == text.count("clean") == 4
    said = "preempted or cancelled: host 0 ("
    assert f"STOPPED: {said}" in hosts.err(0).splitlines()[-1]
    assert [event["message"] for event in hosts.events() if event["kind"] == "preempted"][0].startswith(said)
    error = json.loads((hosts.logs(1) / "error.json").read_text())["message"]
    assert error["errorCode"] == 143 and error["message"].startswith(said)


def test_before_the_job_began(folder: Path, script: Callable[[str], str]) -> None:
    hosts = Hosts(folder, torchrun(script(""), nnodes=2), replicas=2, options=NO_PRELOAD).start(1)
    log = hosts.logs(1) / "monarch.log"
    until(log.exists, "the host's own log")
    until(lambda: "waiting for replica 0" in hosts.err(1), "the host to look for replica 0")
    hosts.processes[1].terminate()
    assert hosts.wait() == [143]
    error = json.loads((hosts.logs(1) / "error.json").read_text())["message"]
    assert error["message"].startswith("preempted or cancelled: host 1 (")


def test_while_interpreters_import(folder: Path, tmp_path: Path, script: Callable[[str], str]) -> None:
    # The mesh is there and no rank was started: nobody has anything to stop, and nobody waits for that.
    (tmp_path / "heavy.py").write_text("import time; time.sleep(1000)")
    options = ("--grace", "1000", "--preload", "heavy")
    hosts = Hosts(folder, torchrun(script(""), nnodes=2), replicas=2, options=options).start()
    until(lambda: any(event["kind"] == "hosts" for event in hosts.events()), "the hosts")
    hosts.processes[1].terminate()
    assert hosts.wait() == [143, 143]


def test_while_a_failed_attempt_is_stopped(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n") and time.sleep(1.5) or sys.exit(0))
            print("pid", os.getpid(), flush=True)
            time.sleep(1000)
        while not os.path.exists(f"{sys.argv[0]}.go"):
            time.sleep(0.02)
        sys.exit(3)
    """)
    hosts = Hosts(folder, torchrun(path, restarts=5), options=NO_PRELOAD).start()
    started(hosts, 1)
    Path(f"{path}.go").touch()
    until(lambda: "told" in hosts.out(), "the end of the attempt to begin")
    hosts.processes[0].terminate()
    assert hosts.wait() == [143], hosts.err()
    assert "preempted or cancelled: host 0 (" in hosts.err().splitlines()[-1]
    assert not (hosts.logs(0) / "attempt_1").exists()


def test_while_a_lost_host_is_being_replaced(folder: Path, script: Callable[[str], str]) -> None:
    # Nobody waits for the one that is gone: the grace is longer than the test.
    options = ("--grace", "1000", "--preload", "", "--replacements", "1")
    hosts = Hosts(folder, torchrun(script(CLEANS_UP), nnodes=2), replicas=2, options=options).start()
    started(hosts, 4).processes[1].kill()
    until(lambda: any(event["kind"] == "replacement" for event in hosts.events()), "the loss to be noticed")
    hosts.processes[0].terminate()
    assert hosts.wait() == [143, -9]
    for left in folder.glob("h*/"):  # of the host that was killed
        shutil.rmtree(left)


@pytest.fixture
def job(apps: Detached, script: Callable[[str], str]) -> tuple[str, Callable[[], str]]:
    """A running app of two hosts whose ranks clean up: its id, and what returns all its logs and events."""
    command = torchrun(script(CLEANS_UP), nnodes=2)
    app_id = apps.run(Role("r", "", entrypoint=command[0], args=command[1:], num_replicas=2), grace=60, preload="none")
    paths = apps.paths(app_id)

    def text() -> str:
        return "".join(path.read_text() for path in [*Path(paths.logs).rglob("*.log"), Path(paths.events)])

    until(lambda: len(re.findall("^pid", text(), re.M)) == 4, "the ranks")
    return app_id, text


def test_a_cancelled_job_is_not_preempted(apps: Detached, job: tuple[str, Callable[[], str]]) -> None:
    app_id, text = job
    apps.scheduler.cancel(app_id)
    status = apps.wait(app_id)
    assert (status.state, status.msg) == (AppState.CANCELLED, "cancelled")
    assert "preempt" not in text() and "was told to stop" in text()
    assert len(re.findall("^clean", text(), re.M)) == 4


def test_a_job_whose_folder_is_removed_is_stopped(apps: Detached, job: tuple[str, Callable[[], str]]) -> None:
    paths = apps.paths(job[0])
    marker = str((state_files.load_undamaged(dict, paths.request) or {})["job"])

    def is_removed() -> bool:
        shutil.rmtree(paths.root, ignore_errors=True)  # where the job makes a file meanwhile, once more
        return not os.path.exists(paths.root)

    until(is_removed, "the end of the folder")
    until(lambda: not processes.marked(marker), "the end of all its processes")
    assert not os.path.exists(paths.root)
