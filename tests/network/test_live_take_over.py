# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run of a live allocation over a network goes on when its leader is lost, and its client finds the new one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.network.clients import Client
from tests.network.conftest import PORT, host_processes
from tests.network.namespaces import Network, requires_namespaces
from torchx_monarch.client.target import Target
from torchx_monarch.transport.address import Address

pytestmark = requires_namespaces

_OPTIONS = (
    "--grace",
    "2",
    "--preload",
    "",
    "--spares",
    "1",
    "--hands-over",
    "1",
    "--lease",
    "6",
    "--peer-timeout",
    "2",
)

_PROGRAM = """
import os, time
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.05)
"""


class LiveRun:
    """Two hosts and a spare one that wait for runs, and a client on a fourth machine.

    Attributes:
        lines: what the ranks of the run have printed, as the client has received it.
    """

    def __init__(self, machines: Network, folder: Path) -> None:
        self.machines = machines
        self.lines: list[str] = []
        self._folder = folder
        self._program = folder / "prog.py"
        self._program.write_text(_PROGRAM.format(go=str(folder / "go")))
        command = ["python", "-m", "torchx_monarch.hosts", "--"]
        self.hosts = host_processes(folder, machines, command, 3, options=_OPTIONS).start()
        there = Address("tls", machines.address(0), PORT)
        others = [machines.address(1), machines.address(2)]
        self.client = Client(Target(there, "trainer", (folder / "client").read_text(), successors=lambda: others))

    def is_ready(self) -> bool:
        """Return whether a run can start, and the spare host is there."""
        status = self.client.dialled.look()
        return status is not None and status.ready and "spare: host 2" in self.hosts.err(0)

    def begin(self) -> None:
        """Start the run; the client follows it from now on."""
        words = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", str(self._program)]
        self._run = self.client.run_spmd_async(words, output=self._take, check=False)

    def _take(self, rank: int, stream: str, text: str) -> None:
        self.lines.extend(text.splitlines())

    def lose(self, *, cut: bool) -> None:
        """Kill host 0, or cut off its machine."""
        self.machines.cut(0) if cut else self.hosts.processes[0].kill()

    def finish(self, *, cut: bool) -> None:
        """Let the ranks end; check the result of the run and the ends of the hosts."""
        (self._folder / "go").touch()
        result = self._run.result(60)
        assert (result.exit_code, result.attempts, self.lines.count("attempt 0")) == (0, 2, 2), self.hosts.err(1)
        assert [one["state"] for one in self.client.runs()] == ["succeeded"]
        assert self.hosts.processes[0].wait(60) == (1 if cut else -9)
        self.hosts.processes[1].terminate()
        assert self.hosts.wait()[2] == 143

    def end(self) -> None:
        """Kill what is left of the hosts."""
        for process in self.hosts.processes.values():
            process.kill()
            process.wait(60)


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.nightly("a batch job is cut off, too"))])
def test_a_client_follows_its_run_to_the_next_host(
    network: Callable[[int], Network], folder: Path, eventually: Callable[..., object], cut: bool
) -> None:
    live = LiveRun(network(4), folder)
    try:
        with live.machines.entered(3):
            eventually(live.is_ready, "the hosts")
            live.begin()
            eventually(lambda: live.lines.count("attempt 0") == 2, "the first attempt")
            live.lose(cut=cut)
            eventually(lambda: live.lines.count("attempt 1") == 2, "the attempt under host 1", seconds=90)
            live.finish(cut=cut)
    finally:
        live.end()
