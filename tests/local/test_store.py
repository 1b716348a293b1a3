# SPDX-License-Identifier: BSD-3-Clause
"""The process that serves the ranks' TCPStore: outlives rank 0, belongs to the host, is nothing to the program."""

from __future__ import annotations

import os
import re
import shutil
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.local.hosts import Hosts
from tests.waits import until

CLIENT = """
import os, sys, time, datetime
rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
import torch.distributed as dist
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=20))
def ended(path):
    while not os.path.exists(path) or os.path.exists(f"/proc/{open(path).read() or 'self'}/fd/0"):
        time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "prog.py"
        path.write_text(CLIENT + f"os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(text))
        return str(path)

    return write


def store_of(hosts: Hosts, replica: int = 0) -> list[psutil.Process]:
    children = psutil.Process(hosts.processes[replica].pid).children()
    return [child for child in children if child.name() == "tcpstore" and not has_ended(child)]


def ports_of(process: psutil.Process) -> set[int]:
    return {connection.laddr.port for connection in process.net_connections("tcp")}


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_it_serves_until_the_last_rank_of_any_host_has_ended(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        if rank < 2:
            open(f"gone{rank}", "w").write(str(os.getpid()))
            sys.exit()
        ended("gone0")
        ended("gone1")
        store.set(f"late{rank}", "word")
        print(store.get(f"late{5 - rank}").decode())
        dist.init_process_group("gloo", rank=rank - 2, world_size=2)
        dist.barrier()
    """)
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", path]
    hosts = Hosts(folder, command, replicas=2).start()
    assert hosts.wait() == [0, 0], hosts.err(0) + hosts.err(1)
    assert hosts.out(1) == "word\nword\n"


def test_each_attempt_has_its_own(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        print(f"attempt {attempt} at {address} {port}: {store.add('n', 1)}", flush=True)
        while not os.path.exists(f"go{attempt}"):
            time.sleep(0.02)
        sys.exit(1 - attempt)
    """)
    hosts = Hosts(folder, ["torchrun", "--max-restarts", "1", "--local-addr", "127.0.0.2", path]).start()
    stores = []

    def meets(attempt: int) -> re.Match[str] | None:
        return re.search(
            rf"attempt {attempt} at 127\.0\.0\.2 (\d+): 1\n", hosts.out()
        )  # in a store that nobody has counted in

    for attempt in range(2):
        found = until(lambda at=attempt: meets(at), "the rank")
        assert isinstance(found, re.Match)
        # Beside it there may be the store of the next attempt.
        [store] = [process for process in store_of(hosts) if int(found[1]) in ports_of(process)]
        stores.append(store)
        Path(path).with_name(f"go{attempt}").touch()
    assert hosts.wait() == [0]
    assert stores[0].pid != stores[1].pid
    until(lambda: all(map(has_ended, stores)), "the end of the stores' processes")
    assert "TCPStore" not in hosts.err()  # which told of no death


def test_it_holds_nothing_of_the_rank_ignores_each_signal_to_the_job_and_dies_with_its_host(
    folder: Path, script: Callable[[str], str]
) -> None:
    path = script("""
        print("pid", os.getpid(), flush=True)
        while not os.path.exists("go"):
            time.sleep(0.02)
        store.set("still", "there")
        print(store.get("still").decode(), flush=True)
        time.sleep(1000)
    """)
    hosts = Hosts(folder, ["torchrun", path]).start()
    until(lambda: len(hosts.rank_pids()) == 1, "the rank")
    [store] = store_of(hosts)
    [rank] = hosts.rank_pids()

    def held(pid: int) -> set[str]:
        return {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}

    assert not {path for path in held(store.pid) & held(rank) if path.startswith(("pipe:", "socket:", "/root", "/tmp"))}
    assert os.readlink(f"/proc/{store.pid}/fd/1") == os.devnull
    assert os.getsid(store.pid) not in (os.getsid(rank), os.getsid(hosts.processes[0].pid))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        store.send_signal(number)
    Path(path).with_name("go").touch()
    until(lambda: "there" in hosts.out(), "the rank to find what it has set")
    hosts.processes[0].kill()
    assert hosts.wait() == [-9]
    until(lambda: has_ended(store), "the end of the store's process")
    for left in folder.glob("h*/"):  # a host that is killed cannot remove its sockets
        shutil.rmtree(left)


def test_its_own_death_is_told(folder: Path, script: Callable[[str], str]) -> None:
    path = script("print('pid', os.getpid(), flush=True)\nstore.get('what nobody sets')")
    hosts = Hosts(folder, ["torchrun", "--nproc-per-node", "2", path]).start()
    until(lambda: len(hosts.rank_pids()) == 2, "the ranks")
    [store] = store_of(hosts)
    store.kill()
    assert hosts.wait() == [1]
    lines = hosts.err().splitlines()
    told = (
        f"[monarch] the process of the ranks' TCPStore (pid {store.pid}) was killed by signal 9 (SIGKILL); ranks that"
    )
    assert sum(line.startswith(told) for line in lines) == 1
    # The second rank may end before the first one's end has it stopped.
    assert re.search(r"FAILED: (rank \d|all 2 ranks).*DistNetworkError", lines[-1])
