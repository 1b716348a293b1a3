# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs whose hosts are on machines of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.network.namespaces import Network, requires_namespaces

pytestmark = requires_namespaces


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "prog.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def test_trains_over_mutual_tls_without_an_option(
    network: Callable[[int], Network], networked: Callable[..., Hosts], script: Callable[[str], str]
) -> None:
    path = script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        print("sum", total.item(), os.environ["MASTER_ADDR"], flush=True)
        dist.destroy_process_group()
    """)
    machines = network(2)
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--tee", "3", path]
    hosts = networked(machines, command).start()
    assert hosts.wait(90) == [0, 0], hosts.err() + hosts.err(1)
    for replica in (0, 1):
        assert hosts.out(replica).count(f"sum 6.0 {machines.address(0)}") == 2
