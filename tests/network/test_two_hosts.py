# SPDX-License-Identifier: BSD-3-Clause
"""Jobs whose hosts are on machines of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.network.namespaces import Network, requires_namespaces
from tests.waits import WITHIN, until

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
    assert hosts.wait() == [0, 0], hosts.err() + hosts.err(1)
    for replica in (0, 1):
        assert hosts.out(replica).count(f"sum 6.0 {machines.address(0)}") == 2


def test_the_port_is_the_users_and_the_address_the_meshs(
    network: Callable[[int], Network], networked: Callable[..., Hosts], script: Callable[[str], str]
) -> None:
    path = script("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], flush=True)")
    machines = network(2)
    words = ["--nnodes", "2", "--master-addr", "node9", "--master-port", "29517", "--node-rank", "1", "--tee", "3"]
    hosts = networked(machines, ["torchrun", *words, path], options=("--grace", "5", "--preload", "")).start()
    assert hosts.wait() == [0, 0], hosts.err() + hosts.err(1)
    for replica in (0, 1):
        assert f"{machines.address(0)} 29517" in hosts.out(replica)


WAITS_IN_THE_FIRST_ATTEMPT = """
    import os, sys, time
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    print("attempt", attempt, "rank", rank, flush=True)
    if attempt == "0":
        time.sleep(1000)
"""


@pytest.mark.parametrize("lost", [1, 0])
def test_goes_on_when_a_machine_is_cut_off_and_its_host_replaced(
    network: Callable[[int], Network],
    networked: Callable[..., Hosts],
    script: Callable[[str], str],
    lost: int,
) -> None:
    path = script(WAITS_IN_THE_FIRST_ATTEMPT)
    machines = network(3)
    options = ("--grace", "5", "--preload", "", "--replacements", "1", "--rejoin-timeout", "15")
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--tee", "3", path]
    hosts = networked(machines, command, options=options).start()
    until(lambda: all(hosts.out(replica).count("attempt 0") == 2 for replica in (0, 1)), "the first attempt")
    gone = hosts.processes[lost]
    machines.cut(lost)
    if lost == 0:
        gone.kill()
        machines.adapt(0)  # where the backend puts the new one, under the old address
    else:
        hosts.within[lost] = machines.within(2)
    hosts.start(lost)
    assert hosts.wait() == [0, 0], hosts.err() + hosts.err(1)
    assert hosts.out(1 - lost).count("attempt 1") == 2
    assert hosts.out(lost).count("attempt 1") == 2
    # The host that was cut off ends by itself, and its ranks with it.
    assert gone.wait(WITHIN) == (-9 if lost == 0 else 1)
    if lost == 1:
        assert "host 1 (" in hosts.err(0)
        assert "lost replica 0" in hosts.err(1)
