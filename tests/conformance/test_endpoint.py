# SPDX-License-Identifier: BSD-3-Clause
"""Where the ranks meet when the user says so: --master-addr, --master-port, the endpoint of a static rendezvous."""

from __future__ import annotations

import socket

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Launchers

MEET = """
    import torch, torch.distributed as dist
    port = sys.argv[1]
    dist.init_process_group(
        "gloo", f"tcp://localhost:{port}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    ones = torch.ones(1)
    dist.all_reduce(ones)
    report([ones.item(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] == port])
    dist.barrier()
    dist.destroy_process_group()  # or torch aborts an interpreter at its end now and then
"""

WAYS = {
    "address and port": ["--master-addr=localhost", "--master-port={port}"],
    "port": ["--master_port", "{port}"],
    "static endpoint": ["--rdzv-endpoint", "localhost:{port}"],
}


@pytest.mark.parametrize(
    "way",
    [
        "static endpoint",
        *(pytest.param(way, marks=pytest.mark.nightly("the first has it")) for way in ("address and port", "port")),
    ],
)
def test_program_that_meets_at_the_named_port(way: str, both: Launchers) -> None:
    port = both.port()
    theirs, ours = both.script(MEET, *(word.replace("{port}", port) for word in WAYS[way]), args=[port])
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert ours.reports == theirs.reports
    assert ours.reports[1][0] == 2.0
    assert ours.reports[1][2] is True


@differs(Difference.STORE)
def test_port_from_the_environment_without_preload(both: Launchers) -> None:
    port = both.port()
    theirs, ours = both.script(MEET, args=[port], environ={"PET_MASTER_PORT": port}, preload="none")
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert ours.reports == theirs.reports != {}


def test_restart_at_the_named_port(both: Launchers) -> None:
    body = """
        import torch.distributed as dist
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.TCPStore("localhost", int(sys.argv[1]), is_master=False)
        mark(attempt)
        sys.exit(1 if attempt == "0" else 0)
    """
    port = both.port()
    theirs, ours = both.script(body, "--master-port", port, "--max-restarts", "1", args=[port], nproc=1)
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert ours.marks() == theirs.marks() == ["0 0", "0 1"]


def test_port_that_is_taken(both: Launchers) -> None:
    port = both.port()
    with socket.create_server(("127.0.0.1", int(port))):
        theirs, ours = both.script("mark('ran')", "--master-port", port, nproc=1)
    assert theirs.code == ours.code == 1
    assert theirs.marks() == ours.marks() == []
    last = ours.err.decode().splitlines()[-1]
    assert f"--master-port={port} cannot be opened on 127.0.0.1: Address already in use. Choose another port" in last
