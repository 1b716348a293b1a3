# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation whose hosts are on machines of their own, and its client on another: one port, with TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.network.clients import Client
from tests.network.conftest import PORT
from tests.network.namespaces import Network, requires_namespaces
from tests.waits import until
from torchx_monarch.client.connection import ask
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.transport import credentials
from torchx_monarch.transport.address import Address

pytestmark = requires_namespaces


def _pump(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one end hangs up before the other
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


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
    client = Client(there)
    with machines.entered(2):  # neither host's machine
        until(lambda: (status := client.dialled.ask_status()) and status.ready, "the mesh")
        for length in (0, 100_000):  # a request may be longer than a line
            result = client.run_spmd(output="store", env={"LONG": length * "x"})
            said = {rank: one.stdout for rank, one in result.output.items()}
            assert said == {rank: f"rank {rank} {length}\n" for rank in (0, 1)}
        # The other hosts do not listen.
        with pytest.raises(UnreachableError):
            ask(Target(Address("tls", machines.address(1), PORT), "trainer", text), {"type": "runs"})
        other_job = credentials.create()[1].to_text()
        for wrong in (other_job, ""):
            with pytest.raises(UnreachableError, match="certificate"):
                ask(Target(there.address, "trainer", wrong), {"type": "runs"})

    # As with `ssh -L 9999:NODE:PORT`: what is dialled is this machine.
    near = socket.create_server(("127.0.0.1", 0))
    with machines.entered(2):
        far = socket.create_connection((machines.address(0), PORT))

    def tunnel() -> None:
        accepted, _ = near.accept()
        back = threading.Thread(target=_pump, args=(far, accepted))
        back.start()
        _pump(accepted, far)
        back.join()
        accepted.close()

    thread = threading.Thread(target=tunnel)
    thread.start()
    local = Target(Address("tls", "127.0.0.1", near.getsockname()[1]), "trainer", text)
    assert [run["state"] for run in Client(local).runs()] == ["succeeded"] * 2
    thread.join(60)
    near.close()
    far.close()
    with machines.entered(2):
        ask(there, {"type": "stop"})
    assert hosts.wait() == [0, 0], hosts.err()
