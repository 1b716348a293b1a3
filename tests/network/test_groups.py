# SPDX-License-Identifier: BSD-3-Clause
"""Groups on two machines, one of which is lost again and again, with a host each of two of three groups."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.contract.groups import LIGHTHOUSE, LOSSES, STEPS, Job, lose_again_and_again, show
from tests.local.hosts import Hosts, torchrun
from tests.network.conftest import PORT
from tests.network.namespaces import Network, kill_all, requires_namespaces
from torchx_monarch.transport import credentials

pytestmark = [requires_namespaces, pytest.mark.nightly("twenty losses take minutes"), pytest.mark.timeout(3600)]

_MACHINES = {"group0": [0], "group1": [0, 1], "group2": [1, 0]}
"""Where the hosts of each group are. The lighthouse is on machine 0."""

_OPTIONS = ("--grace", "5", "--preload", "", "--replacements", "1", "--rejoin-timeout", "60")


class _Job(Job):
    """A job whose lost hosts are started again, as any backend would.

    Args:
        folder: for what it writes; short.
        go: the word at which its ranks end.
    """

    def __init__(self, folder: Path, network: Network, go: str) -> None:
        super().__init__({group: len(machines) for group, machines in _MACHINES.items()})
        self._network, self._is_cut, self._groups = network, False, dict[str, Hosts]()
        program = folder / "steps.py"
        hears = f"import os\ndef told(word):\n    return os.path.exists({str(folder)!r} + '/told-' + word)\n"
        program.write_text(hears + STEPS)
        for number, (group, machines) in enumerate(_MACHINES.items()):
            (folder / go / group).mkdir(parents=True)
            environ = {
                "MONARCH_RENDEZVOUS": f"tls:{network.address(machines[0])}:{PORT + number}",
                "MONARCH_CREDENTIALS": credentials.create()[0].to_text(),
                "REPLICA_GROUP_ID": str(number),
                "NUM_REPLICA_GROUPS": str(len(_MACHINES)),
                "GO": go,
            }
            command = torchrun(str(program), nproc=1, nnodes=len(machines), restarts=1)
            options = (*_OPTIONS, "--lighthouse", f"{network.address(0)}:{PORT - 1}")
            within = {replica: network.within(machine) for replica, machine in enumerate(machines)}
            hosts = Hosts(folder / go / group, command, len(machines), options, environ, within=within)
            self._groups[group] = hosts.start()

    def lines(self, group: str) -> Iterable[str]:
        hosts = self._groups[group]
        for replica, process in hosts.processes.items():
            if process.poll() and not (self._is_cut and _MACHINES[group][replica] == 1):
                hosts.start(replica)
        return [line for replica in hosts.processes for line in hosts.out(replica).splitlines()]

    def wait(self) -> None:
        for hosts in self._groups.values():
            assert hosts.wait() == [0] * len(hosts.processes), hosts.err()

    @contextlib.contextmanager
    def without_machine(self) -> Iterator[None]:
        """Cut the link of machine 1 and kill all that runs on it, until the context ends."""
        self._is_cut = True
        self._network.cut(1)
        kill_all(self._network.namespace(1))
        yield
        self._network.adapt(1)
        self._is_cut = False


@pytest.fixture
def machines(network: Callable[[int], Network]) -> Iterator[Network]:
    """Yield two machines, with a lighthouse on the first."""
    machines = network(2)
    command = [*machines.within(0), sys.executable, "-c", LIGHTHOUSE, "--bind", f"0.0.0.0:{PORT - 1}"]
    with subprocess.Popen(command) as lighthouse:
        yield machines
        lighthouse.kill()


@pytest.mark.parametrize("lost", ["rank", "host"])
def test_groups_lose_ranks_and_hosts(folder: Path, machines: Network, lost: str) -> None:
    def tell(word: str) -> None:
        (folder / f"told-{word}").touch()

    took = lose_again_and_again(lambda go: _Job(folder, machines, go), tell, lost)
    show("two network namespaces", lost, took)


def test_groups_lose_a_machine(folder: Path, machines: Network) -> None:
    took = []
    for loss in range(LOSSES):
        job = _Job(folder, machines, f"go{loss}")
        before = job.until_all_take_part({})
        with job.without_machine():
            job.until_all_take_part(before, groups=["group0"])
        began = time.time()
        restarted = [rank for rank in before if not rank.startswith("group0/")]
        after = job.until_all_take_part(before, restarted)
        took.append(max(after[rank].time for rank in restarted) - began)
        (folder / f"told-go{loss}").touch()
        job.wait()
    show("two network namespaces", "machine", took)
