# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A job over a network goes on when its leader is lost, on one side of a broken network and never on both."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.network.conftest import PORT, host_processes
from tests.network.namespaces import Network, requires_namespaces
from torchx_monarch.client.connection import ask
from torchx_monarch.client.target import Target
from torchx_monarch.transport.address import Address

pytestmark = requires_namespaces

Eventually = Callable[..., object]

_PROGRAM = """
import os, time
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", os.environ["RANK"], time.time(), flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.05)
"""


class Job:
    """Hosts of one rank each, which ends when there is a file ``go``."""

    def __init__(
        self,
        machines: Network,
        folder: Path,
        replicas: int,
        nnodes: str,
        *more: str,
    ) -> None:
        self.machines = machines
        self.folder = folder
        program = folder / "prog.py"
        program.write_text(_PROGRAM.format(go=str(folder / "go")))
        conf = ("--rdzv-conf", "join_timeout=60,last_call_timeout=60")
        command = ["torchrun", "--nnodes", nnodes, "--nproc-per-node", "1", "--tee", "3", *conf, str(program)]
        options = ("--grace", "2", "--preload", "", "--lease", "6", "--peer-timeout", "2", "--hands-over", "1", *more)
        self.replicas = replicas
        self.hosts = host_processes(folder, machines, command, replicas, options=options).start()

    def attempts(self, replica: int) -> list[str]:
        """The attempts in which a replica has run its rank."""
        words = self.hosts.out(replica).split()
        return [words[at + 1] for at, word in enumerate(words) if word.endswith("attempt")]

    def begun(self, replica: int, attempt: str) -> float:
        """When the rank of a replica began an attempt, in seconds since the epoch."""
        words = self.hosts.out(replica).split()
        at = next(at for at, word in enumerate(words) if word.endswith("attempt") and words[at + 1] == attempt)
        return float(words[at + 4])

    def errors(self) -> str:
        return "".join(self.hosts.err(replica) for replica in range(self.replicas))

    def end(self) -> None:
        """Kill what is left of the hosts."""
        for replica in self.hosts.processes:
            self.kill(replica)

    def kill(self, replica: int) -> None:
        self.hosts.processes[replica].kill()
        self.hosts.processes[replica].wait(60)

    def finish(self) -> list[int]:
        (self.folder / "go").touch()
        return self.hosts.wait()


@pytest.fixture
def start(network: Callable[[int], Network], folder: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(replicas: int, nnodes: str, *options: str) -> Job:
        made.append(Job(network(replicas), folder, replicas, nnodes, *options))
        return made[-1]

    yield make
    for job in made:
        job.end()


def test_a_spare_host_makes_up_for_a_leader_that_is_cut_off_and_ends(
    start: Callable[..., Job], eventually: Eventually
) -> None:
    job = start(3, "2", "--spares", "1")
    eventually(lambda: job.attempts(0) == ["0"] == job.attempts(1), "the first attempt")
    eventually(lambda: "spare: host 2" in job.hosts.err(0), "the spare host")
    job.machines.cut(0)
    eventually(lambda: job.attempts(1) == ["0", "1"] and job.attempts(2) == ["1"], "the attempt under host 1")
    assert job.hosts.processes[0].wait(60) == 1
    # It has lost both hosts, and knows of either first: too few for the job, or for a majority.
    assert re.search("1 of the 3 hosts that may live|1 of at least 2 hosts left", job.hosts.err(0)), job.errors()
    job.machines.adapt(0)
    assert job.finish() == [1, 0, 0], job.errors()
    assert job.attempts(0) == ["0"]


def test_a_leader_that_has_ended_needs_no_majority(start: Callable[..., Job], eventually: Eventually) -> None:
    job = start(2, "1", "--spares", "1")
    eventually(lambda: job.attempts(0) == ["0"] and "spare: host 1" in job.hosts.err(0), "the first attempt")
    job.kill(0)
    eventually(lambda: job.attempts(1) == ["1"], "the attempt under host 1")
    # Clients look at the other hosts, at the port of replica 0.
    there = Address("tls", job.machines.address(0), PORT)
    target = Target(there, "trainer", (job.folder / "client").read_text(), successors=lambda: [job.machines.address(1)])
    with job.machines.entered(1):
        assert [host["replica"] for host in ask(target, {"type": "look"})["hosts"]] == [1]
    assert job.finish() == [-signal.SIGKILL, 0], job.errors()


@pytest.mark.nightly("up to 15 s of processor time each; tests/unit/test_quorum.py has the decisions")
@pytest.mark.parametrize(
    ("replicas", "split", "goes_on"),
    [
        (2, (1,), (0,)),  # of two halves, the leader's
        (3, (1, 2), (1, 2)),
        (3, (2,), (0, 1)),
        (4, (2, 3), (0, 1)),
        (5, (0, 4), (1, 2, 3)),
    ],
)
def test_one_side_of_a_broken_network_goes_on(
    start: Callable[..., Job], eventually: Eventually, replicas: int, split: tuple[int, ...], goes_on: tuple[int, ...]
) -> None:
    job = start(replicas, f"1:{replicas}")
    every = range(replicas)
    eventually(lambda: all(job.attempts(each) == ["0"] for each in every), "the first attempt")
    job.machines.split(*split)
    ends = [replica for replica in every if replica not in goes_on]
    for replica in ends:
        assert job.hosts.processes[replica].wait(90) == 1
    eventually(lambda: len({job.attempts(each)[-1] for each in goes_on} - {"0"}) == 1, "one attempt", seconds=60)
    job.machines.heal(*split)
    assert job.finish() == [int(each in ends) for each in every], job.errors()


@pytest.mark.nightly("5 s of processor time; a stopped leader on one machine ends in the same way")
def test_a_replica_0_that_is_started_again_does_not_lead(start: Callable[..., Job], eventually: Eventually) -> None:
    job = start(3, "1:3")
    eventually(lambda: all(job.attempts(each) == ["0"] for each in range(3)), "the first attempt")
    job.kill(0)
    eventually(lambda: job.attempts(2) == ["0", "1"], "the attempt under host 1")
    job.hosts.start(0)
    assert job.hosts.processes[0].wait(60) == 1
    assert "another host has taken over the job (term 1, and this one has 0)" in job.hosts.err(0)
    assert job.finish() == [1, 0, 0], job.errors()
    assert job.attempts(1) == job.attempts(2) == ["0", "1"]
