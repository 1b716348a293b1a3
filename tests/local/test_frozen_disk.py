# SPDX-License-Identifier: BSD-3-Clause
"""Hosts whose disk stands still for longer than their lease, as where a file server fails over: none is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.local.disks import Disk, mounted
from tests.local.hosts import Hosts
from tests.local.live import Live
from tests.waits import until
from torchx_monarch.client.result import RunResult

LEASE = 2.0

OPTIONS = ("--grace", "5", "--preload", "", "--lease", f"{LEASE:g}")

PROGRAM = """
import pathlib
folder = pathlib.Path({folder!r})
(folder / f"runs_{{attempt}}_{{rank}}").touch()
while not (folder / f"go_{{attempt}}").exists():
    time.sleep(0.02)
print("goes on", flush=True)
if attempt == 0:
    if rank == 1:
        os._exit(3)
    time.sleep(1000)
"""


def all_live(hosts: Hosts, disk: Disk, phase: str) -> None:
    """Thaw the disk after more than a lease in which no host ends."""
    frozen = time.monotonic()

    def is_long_enough() -> bool:
        ended = {replica: hosts.err(replica) for replica, host in hosts.processes.items() if host.poll() is not None}
        assert not ended, f"{phase}: {ended}"
        return time.monotonic() > frozen + 2 * LEASE

    until(is_long_enough, "more than a lease")
    disk.thaw()


def run(hosts: Hosts, tmp_path: Path, attempt: int) -> None:
    """Wait for the ranks of an attempt."""

    def runs() -> bool:
        ended = {replica: hosts.err(replica) for replica, host in hosts.processes.items() if host.poll() is not None}
        assert not ended, ended
        return len(list(tmp_path.glob(f"runs_{attempt}_*"))) == 2

    until(runs, f"the ranks of attempt {attempt}", 30.0)


def test_no_host_of_a_batch_job_is_lost(folder: Path, script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(PROGRAM.format(folder=str(tmp_path)))
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", path]
    hosts = Hosts(folder, command, 2, OPTIONS, {"MONARCH_EVENTS": str(folder / "logs" / "events.jsonl")})
    with mounted(hosts, folder / "logs") as disk:
        hosts.start()
        run(hosts, tmp_path, 0)
        disk.freeze()
        (tmp_path / "go_0").touch()
        all_live(hosts, disk, "ranks print, one fails, and they are restarted")
        run(hosts, tmp_path, 1)
        disk.freeze()
        all_live(hosts, disk, "ranks run")
        disk.freeze()
        (tmp_path / "go_1").touch()
        all_live(hosts, disk, "ranks end")
        assert hosts.wait() == [0, 0]
        assert "restart 1 of 1 after: rank 1" in hosts.err(0)
        assert "does not answer" not in hosts.err(0) + hosts.err(1)


def test_no_host_of_an_allocation_is_lost(folder: Path, script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(PROGRAM.format(folder=str(tmp_path)))
    environ = {"MONARCH_EVENTS": str(folder / "logs" / "events.jsonl")}
    live = Live(folder, ["torchrun", "--nnodes", "2", path], 2, options=OPTIONS, environ=environ)
    results: list[RunResult] = []
    words = ["torchrun", "--nnodes", "2", "--max-restarts", "1", path]
    running = threading.Thread(target=lambda: results.append(live.run(*words)))
    with mounted(live, folder / "logs") as disk:
        live.ready()
        disk.freeze()
        running.start()
        all_live(live, disk, "the run begins")
        run(live, tmp_path, 0)
        disk.freeze()
        (tmp_path / "go_0").touch()
        all_live(live, disk, "a rank of the run fails, and they are restarted")
        run(live, tmp_path, 1)
        (tmp_path / "go_1").touch()
        running.join()
        assert [result.exit_code for result in results] == [0]
        assert live.end() == [0, 0]
