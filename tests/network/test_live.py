# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation whose hosts are on machines of their own, and its client on another: one port, with TLS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import torchx_monarch
from tests.local.hosts import Hosts
from tests.network.conftest import PORT
from tests.network.namespaces import Network, requires_namespaces
from tests.network.relay import Relay
from tests.waits import until
from torchx_monarch.client import hosts as client_hosts
from torchx_monarch.client.connection import Target, ask
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.transport import credentials
from torchx_monarch.transport.address import Address

pytestmark = requires_namespaces


class Dialled(client_hosts.Hosts):
    """Hosts of which it is known where to dial, and which no scheduler knows."""

    def __init__(self, target: Target) -> None:
        super().__init__("monarch_slurm://torchx/app")
        self._there = target

    @property
    def target(self) -> Target:
        return self._there

    def check_alive(self) -> None:
        """Do nothing: no scheduler knows whether they have ended."""


def client_of(target: Target) -> torchx_monarch.SPMDJob:
    """Return the job of such hosts."""
    job = torchx_monarch.SPMDJob("monarch_slurm://torchx/app")
    job._role_hosts = Dialled(target)
    return job


def test_a_client_reaches_one_port_by_its_certificate_also_through_a_tunnel(
    network: Callable[[int], Network],
    networked: Callable[..., Hosts],
    folder: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / "prog.py"
    path.write_text("import os\nprint('rank', os.environ['RANK'], len(os.environ.get('LONG', '')))\n")
    machines = network(3)
    command = ["python", "-m", "torchx_monarch.hosts", "--", "torchrun", "--nproc-per-node", "1", str(path)]
    hosts = networked(machines, command, options=("--grace", "5", "--preload", "")).start()
    text = (folder / "client").read_text()
    there = Target(Address("tls", machines.address(0), PORT), "trainer", text)
    client = client_of(there)
    with machines.entered(2):  # neither host's machine
        until(lambda: (status := client._role_hosts.ask_status()) and status.ready, "the mesh")
        for length in (0, 100_000):  # a request may be longer than a line
            result = client.run_spmd(output="store", env={"LONG": length * "x"})
            said = {rank: rank_output.stdout for rank, rank_output in result.output.items()}
            assert said == {rank: f"rank {rank} {length}\n" for rank in (0, 1)}
        # The other hosts do not listen.
        with pytest.raises(UnreachableError):
            ask(Target(Address("tls", machines.address(1), PORT), "trainer", text), {"type": "runs"})
        other_job = credentials.create()[1].to_text()
        for wrong in (other_job, ""):
            with pytest.raises(UnreachableError, match="certificate"):
                ask(Target(there.address, "trainer", wrong), {"type": "runs"})

    # As with `ssh -L 9999:NODE:PORT`: what is dialled is this machine.
    with Relay(PORT, f"/run/netns/{machines.namespace(0)}") as tunnel:
        local = Target(Address("tls", "127.0.0.1", tunnel.port), "trainer", text)
        assert [run["state"] for run in client_of(local).runs()] == ["succeeded"] * 2
    with machines.entered(2):
        ask(there, {"type": "stop"})
    assert hosts.wait() == [0, 0], hosts.err()
