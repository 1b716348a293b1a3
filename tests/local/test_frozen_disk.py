# SPDX-License-Identifier: BSD-3-Clause
"""Hosts whose disk stands still for longer than their lease, as where a file server fails over: none is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.local.disks import Disk, mounted
from tests.local.hosts import Hosts
from tests.local.live import Live
from tests.waits import until
from torchx_monarch.client.rank_queries import ask_samples
from torchx_monarch.client.result import RunResult

LEASE = 2.0

OPTIONS = ("--grace", "5", "--preload", "", "--lease", f"{LEASE:g}")

PROGRAM = """
import pathlib
folder = pathlib.Path({folder!r})
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.02)
(folder / f"runs_{{attempt}}_{{rank}}").touch()
if attempt == 1 and rank == 0:
    wait("print")
    for number in range(4096):
        print(str(number).ljust(1023))
    (folder / "printed").touch()
wait(f"go_{{attempt}}")
print("goes on", flush=True)
if attempt == 0 and rank == 0:
    time.sleep(1000)
os._exit(0 if attempt else 3)
"""


def all_live(hosts: Hosts) -> bool:
    ended = {replica: hosts.err(replica) for replica, host in hosts.processes.items() if host.poll() is not None}
    assert not ended, ended
    return True


@contextlib.contextmanager
def frozen(hosts: Hosts, disk: Disk) -> Iterator[None]:
    """Freeze the disk for more than a lease; meanwhile no host ends, and no rank prints more than hosts may hold."""
    disk.freeze()
    yield
    since = time.monotonic()
    until(lambda: all_live(hosts) and time.monotonic() > since + 2 * LEASE, "more than a lease")
    assert not (hosts.folder / "printed").exists()
    disk.thaw()


def run(hosts: Hosts, attempt: int) -> None:
    """Wait for the ranks of an attempt."""
    until(lambda: all_live(hosts) and len(list(hosts.folder.glob(f"runs_{attempt}_*"))) == 2, f"attempt {attempt}")


def test_no_host_of_a_batch_job_is_lost(folder: Path, script: Callable[[str], str]) -> None:
    path = script(PROGRAM.format(folder=str(folder)))
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", path]
    hosts = Hosts(folder, command, 2, OPTIONS, {"MONARCH_EVENTS": str(folder / "logs" / "events.jsonl")})
    with mounted(hosts, folder / "logs") as disk:
        hosts.start()
        run(hosts, 0)
        with frozen(hosts, disk):  # while a rank fails, and all are started again
            (folder / "go_0").touch()
        run(hosts, 1)
        with frozen(hosts, disk):  # while ranks run
            (folder / "print").touch()
        until((folder / "printed").exists, "the rank that prints")
        (folder / "printed").unlink()
        with frozen(hosts, disk):  # while ranks end
            (folder / "go_1").touch()
            assert [sample.rank for sample in ask_samples(hosts.client)[0].ranks] == [0, 1]
        assert hosts.wait() == [0, 0]
        assert "restart 1 of 1 after: rank 1" in hosts.err(0)
        assert "does not answer" not in hosts.err(0) + hosts.err(1)
        printed = [line.split()[-1] for line in hosts.out(0).splitlines() if line.endswith(" " * 99)]
        assert printed == [str(number) for number in range(4096)]


def test_no_host_of_an_allocation_is_lost(folder: Path, script: Callable[[str], str]) -> None:
    path = script(PROGRAM.format(folder=str(folder)))
    words = ["torchrun", "--nnodes", "2", "--max-restarts", "1", path]
    live = Live(folder, words, 2, options=OPTIONS, environ={"MONARCH_EVENTS": str(folder / "logs" / "events.jsonl")})
    results: list[RunResult] = []
    running = threading.Thread(target=lambda: results.append(live.run()))
    with mounted(live, folder / "logs") as disk:
        live.ready()
        with frozen(live, disk):  # while the run begins
            running.start()
        run(live, 0)
        with frozen(live, disk):  # while a rank fails, and all are started again
            (folder / "go_0").touch()
        run(live, 1)
        (folder / "print").touch()
        (folder / "go_1").touch()
        running.join()
        assert [result.exit_code for result in results] == [0]
        assert live.end() == [0, 0]
