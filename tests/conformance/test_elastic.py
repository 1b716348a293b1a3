# SPDX-License-Identifier: BSD-3-Clause
"""Hosts that come and go: agents of ``python -m torch.distributed.run`` that share a c10d rendezvous, and our hosts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from tests.conformance.differences import Difference, differs
from tests.local.hosts import Hosts
from tests.ports import free_port
from tests.waits import WITHIN, until
from torchx_monarch.client.connection import Target, ask

START = """
import os, sys, time
rank, size, count = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
def mark(text):
    with open("marks", "a") as file:
        file.write(text + chr(10))
"""


class Nodes(Protocol):
    """The launchers of a job, one for each node."""

    def start(self, node: int) -> None: ...

    def kill(self, node: int) -> None:
        """Lose a node, ranks and all."""

    def wait(self, node: int) -> int: ...


class TorchrunNodes:
    """Agents of torchrun; the first one serves the rendezvous."""

    def __init__(self, folder: Path, options: list[str], nodes: int) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "j"]
        self._command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *options]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        # Without this a host that joins torch 2.13's waits for ever for a MASTER_ADDR that was told before it came
        # (DynamicRendezvousHandler.next_rendezvous builds its bootstrap_store_info once, in a store of one round).
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        null = subprocess.DEVNULL
        self._processes[node] = subprocess.Popen(self._command, env=env, stdin=null, stdout=null, stderr=null)

    def kill(self, node: int) -> None:
        self._processes[node].kill()
        self._processes[node].wait()
        for path in Path().glob("pid-*"):  # under torchrun they outlive their agent
            pid, parent = path.read_text().split()
            if int(parent) == self._processes[node].pid:
                os.kill(int(pid), signal.SIGKILL)

    def wait(self, node: int) -> int:
        return self._processes[node].wait(WITHIN)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class HostNodes:
    """Our host processes."""

    def __init__(self, folder: Path, options: list[str], nodes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="h"))
        self._hosts = Hosts(self._folder, ["torchrun", *options], replicas=nodes, options=("--preload", ""))

    def registered(self) -> list[int]:
        """The replicas that host 0 knows."""
        target = Target.from_handle("monarch_local://torchx/app", address=f"unix:{self._folder}/r.sock")
        return [host["replica"] for host in ask(target, {"type": "state"})["hosts"]]

    def start(self, node: int) -> None:
        self._hosts.start(node)

    def kill(self, node: int) -> None:
        self._hosts.processes[node].kill()
        self._hosts.processes[node].wait()

    def wait(self, node: int) -> int:
        return self._hosts.processes[node].wait(WITHIN)

    def close(self) -> None:
        for process in self._hosts.processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self._folder)


Start = Callable[..., Nodes]


@pytest.fixture(
    params=[pytest.param(TorchrunNodes, id="torchrun", marks=pytest.mark.torchrun), pytest.param(HostNodes, id="here")]
)
def start(
    request: pytest.FixtureRequest, leaves_nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    monkeypatch.chdir(tmp_path)
    made = []

    def make(body: str, *options: str, nodes: int) -> Nodes:
        (tmp_path / "prog.py").write_text(START + textwrap.dedent(body))
        launched = request.param(tmp_path, ["--nnodes", f"1:{nodes}", *options, "prog.py"], nodes)
        made.append(launched)
        launched.start(0)
        return launched  # type: ignore[no-any-return]

    yield make
    for launched in made:
        launched.close()


def marks() -> list[str]:
    path = Path("marks")
    return path.read_text().splitlines() if path.exists() else []


@differs(Difference.LAST_CALL, Difference.RESTARTS_BEFORE)
def test_growth(start: Start, request: pytest.FixtureRequest) -> None:
    here = request.node.callspec.id == "here"
    body = """
        mark(f"rank {rank} of {size}, restart {count}")
        if size == "1" and count == "0":
            sys.exit(1)
        while size == "1":
            mark(f"pid {os.getpid()}")
            time.sleep(0.05)
    """
    nodes = start(body, "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=10", nodes=3)
    until(lambda: "rank 0 of 1, restart 1" in marks() and marks()[-1].startswith("pid "), "the restart")
    nodes.start(1)
    if isinstance(nodes, HostNodes):
        until(lambda: 1 in nodes.registered(), "the newcomer's registration")
        count = len(marks())
        until(lambda: len(marks()) > count, "a mark after it")
    else:
        pid = int(marks()[-1].split()[1])
        until(lambda: not psutil.pid_exists(pid), "the end of the rank")
    assert not any(" of 2" in mark for mark in marks())
    assert [nodes.wait(0), nodes.wait(1)] == [0, 0]
    said = [line for line in marks() if line.startswith("rank")]
    assert said[:2] == ["rank 0 of 1, restart 0", "rank 0 of 1, restart 1"]
    # Growth is no restart, in either; who has come in the meantime does not know of those before, under torchrun.
    counts = ["1", "1"] if here else ["0", "1"]
    assert sorted(line.partition(", restart ")[2] for line in said[2:]) == counts
    assert sorted(line.partition(",")[0] for line in said[2:]) == ["rank 0 of 2", "rank 1 of 2"]


@differs(Difference.LOST_HOST)
def test_loss(start: Start, request: pytest.FixtureRequest) -> None:
    body = """
        with open(f"pid-{rank}", "w") as file:
            file.write(f"{os.getpid()} {os.getppid()}")
        mark(f"rank {rank} of {size}, restart {count}")
        while size == "2":
            time.sleep(0.05)
            try:
                os.kill(int(open(f"pid-{1 - int(rank)}").read().split()[0]), 0)
            except ProcessLookupError:
                sys.exit(1)  # as a rank whose peer is gone
            except (OSError, IndexError):
                pass  # has not begun
    """
    nodes = start(body, "--rdzv-conf", "last_call_timeout=60", nodes=2)
    nodes.start(1)
    until(lambda: len(marks()) == 2, "the ranks")
    nodes.kill(1)
    if request.node.callspec.id == "here":
        assert nodes.wait(0) == 0
        assert marks()[2:] == ["rank 0 of 1, restart 1"]
    else:
        assert nodes.wait(0) == 1
        assert len(marks()) == 2
