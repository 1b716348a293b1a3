# SPDX-License-Identifier: BSD-3-Clause
"""Hosts that are stopped (SIGSTOP): still there, and of no use."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchx.specs import AppState, Role

from tests.local.detached import Detached
from tests.local.disks import mounted
from tests.local.hosts import Hosts
from tests.waits import WITHIN, until
from torchx_monarch.backends.core import state_files
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.status import render
from torchx_monarch.cli.top import head
from torchx_monarch.system import processes

SLEEPER = "print('pid', os.getpid(), flush=True)\ntime.sleep(1000)\n"


@pytest.mark.parametrize("replica", [0, 1])
def test_the_process_that_does_not_answer_is_the_cause(
    folder: Path, script: Callable[[str], str], replica: int
) -> None:
    options = ("--grace", "5", "--preload", "", "--lease", "6")
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--tee", "3", script(SLEEPER)]
    hosts = Hosts(folder, command, 2, options).start()
    until(lambda: len(hosts.rank_pids()) == 4, "the ranks")
    until(lambda: any(event["kind"] == "output" for event in hosts.events()), "the controller's report of it")
    host, other = hosts.processes[replica].pid, 1 - replica
    os.kill(host, signal.SIGSTOP)
    assert hosts.processes[other].wait(WITHIN) == 1
    error = json.loads((hosts.logs(other) / "error.json").read_text())["message"]
    assert error["message"].startswith(f"host {replica} ("), error
    assert f"pid {host}) does not answer: no message from it for 6 s (lease)" in error["message"]
    assert error["extraInfo"]["replica"] == replica
    os.kill(host, signal.SIGCONT)
    assert hosts.wait(WITHIN) == [1, 1]
    if replica == 0:  # it does not blame the host that has left it
        assert f"FAILED: host 0 ({os.uname().nodename}, pid {host}) did not run for " in hosts.err(0)


_PRINTER = """
print("ready", flush=True)
while not os.path.exists("stalled"):
    time.sleep(0.02)
if rank == 2:
    for number in range(8192):
        print(str(number).ljust(1023))
    open("printed", "w").close()
elif rank == 3:
    time.sleep(8)  # longer than the lease
    open("waited", "w").close()
"""


@contextlib.contextmanager
def unread_pipe(hosts: Hosts) -> Iterator[Callable[[], Callable[[], str]]]:
    """Make the stdout of host 1 a pipe; the function that stalls it returns one that reads it to its end."""
    hosts.logs(1).mkdir(parents=True)
    os.mkfifo(hosts.logs(1) / "out")
    with open(os.open(hosts.logs(1) / "out", os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:

        def stall() -> Callable[[], str]:
            ready = b""
            while ready.count(b"ready\n") < 2:
                select.select([pipe], [], [], WITHIN)
                ready += os.read(pipe.fileno(), 4096)
            os.set_blocking(pipe.fileno(), True)
            return lambda: pipe.read().decode()

        yield stall


def test_output_that_is_not_taken_stops_the_rank_that_prints_and_not_its_host(
    folder: Path, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--grace", "5", "--preload", "", "--lease", "5")
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", script(_PRINTER)]
    hosts = Hosts(folder, command, 2, options, wrapper=("env",))
    with unread_pipe(hosts) as stall:
        hosts.start()
        go_on = stall()
        (tmp_path / "stalled").touch()

        def has_waited() -> bool:
            assert hosts.processes[0].poll() is None, hosts.err(0)
            return (tmp_path / "waited").exists()

        until(has_waited, "the rank that prints nothing")
        assert not (tmp_path / "printed").exists(), "8 MB are held in memory"
        printed = [line.split()[-1] for line in go_on().splitlines() if line.endswith(" " * 99)]
        assert printed == [str(number) for number in range(8192)]
        assert hosts.wait() == [0, 0]


@pytest.mark.nightly("waits half a minute for what SIGKILL does not end")
@pytest.mark.parametrize(("nnodes", "codes"), [("1", [1]), ("1:2", [0, 1])])
def test_no_attempt_begins_beside_a_rank_that_waits_inside_the_kernel(
    folder: Path, script: Callable[[str], str], tmp_path: Path, nnodes: str, codes: list[int]
) -> None:
    """Of the last rank, on a host that is lost then. Another host goes on without it, if the job allows that."""
    path = script(f"""
        import pathlib
        folder = pathlib.Path({str(tmp_path)!r})
        print("attempt", attempt, flush=True)
        if attempt == 0 and rank == 1:
            (folder / "pid").write_text(str(os.getpid()))
            while not (folder / "frozen").exists():
                time.sleep(0.02)
            open(folder / "disk" / "checkpoint", "w")
        if attempt == 0:
            while not (folder / "blocked").exists():
                time.sleep(0.02)
            sys.exit(3)
    """)
    nproc, conf = 3 - len(codes), "join_timeout=60,last_call_timeout=1"
    words = ["--nnodes", nnodes, "--nproc-per-node", str(nproc), "--max-restarts", "1", "--rdzv-conf", conf]
    options = ("--grace", "1", "--preload", "")
    hosts = Hosts(folder, ["torchrun", *words, path], len(codes), options, wrapper=("env",))
    with mounted(hosts, tmp_path / "disk") as disk:
        hosts.start()
        pid = int(str(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the last rank")))
        disk.freeze()
        (tmp_path / "frozen").touch()

        def state() -> str | None:
            found = processes.process(pid)
            return found and found.state

        until(lambda: state() == "D", "the rank that waits for the disk")
        (tmp_path / "blocked").touch()
        assert hosts.wait() == codes
        assert state() == "D"
    reason = f"did not stop its ranks: not even SIGKILL ends pid {pid}, as if it waits inside the kernel"
    assert f"host {len(codes) - 1} (" in hosts.err(0) and reason in hosts.err(0)
    assert hosts.out(0).count("attempt 1") == (len(codes) > 1)


def test_a_stopped_host_that_is_cancelled_ends_its_ranks_in_good_order(
    apps: Detached, script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script(f"""
        def stop(*_):
            open("{tmp_path}/saved", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(1000)
    """)
    app_id = apps.run(Role("r", image="", entrypoint="python", args=[path]), grace=30, preload="none")
    until(lambda: any("ready" in line for line in apps.log(app_id)), "the rank")
    os.kill(apps.host(app_id, 0), signal.SIGSTOP)
    apps.runner.cancel(apps.handle(app_id))
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert (tmp_path / "saved").exists()


def test_status_says_since_when_a_job_does_not_answer_whose_processes_are_stopped(
    apps: Detached, script: Callable[[str], str]
) -> None:
    path = script("print('ready', flush=True)\ntime.sleep(1000)\n")
    app_id = apps.run(Role("r", image="", entrypoint="torchrun", args=["--nproc-per-node", "1", path]), preload="none")
    until(lambda: any("ready" in line for line in apps.log(app_id)), "the rank")
    events = Path(state_files.app_paths(app_id).events)
    host, supervisor = apps.host(app_id, 0), apps.owner(app_id).supervisor.pid

    def status() -> str:
        with opened_job(apps.handle(app_id), timeout=1.0) as job:
            facts = job.read(0.0)
        assert facts.status.state == "RUNNING"
        return render(facts.status) + "".join(head(facts, 1000))

    for pid in (supervisor, host):
        os.kill(pid, signal.SIGSTOP)
    long_ago = time.time() - 3600
    os.utime(events, (long_ago, long_ago))
    since = (
        f"host 0 does not answer; its last sign of life was at {time.strftime('%H:%M:%S', time.localtime(long_ago))}"
    )
    assert status().count(since) == 2
    assert events.stat().st_mtime == pytest.approx(long_ago)  # who reads a job changes nothing
    os.kill(host, signal.SIGCONT)
    until(lambda: events.stat().st_mtime > long_ago + 1, "another sign of life")
    assert "does not answer" not in status()
    os.kill(supervisor, signal.SIGCONT)
    apps.runner.cancel(apps.handle(app_id))
    assert apps.wait(app_id).state == AppState.CANCELLED
