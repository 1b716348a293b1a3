# SPDX-License-Identifier: BSD-3-Clause
"""The pre-flight on hosts that are machines of their own: what differs between them is named before ranks start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.network.namespaces import Network, requires_namespaces

pytestmark = requires_namespaces


@pytest.fixture
def new_hosts(
    network: Callable[[int], Network], networked: Callable[..., Hosts], tmp_path: Path
) -> Callable[[], tuple[Network, Hosts]]:
    """Makes two machines and hosts for them with the pre-flight, which are not started."""

    def make() -> tuple[Network, Hosts]:
        program = tmp_path / "prog.py"
        program.write_text("import os\nprint('rank', os.environ['RANK'], 'runs', flush=True)\n")
        command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--tee", "3", str(program)]
        machines = network(2)
        options = ("--grace", "5", "--preload", "", "--preflight", "on")
        return machines, networked(machines, command, options=options)

    return make


def test_hosts_that_are_alike_run(new_hosts: Callable[[], tuple[Network, Hosts]]) -> None:
    _, hosts = new_hosts()
    assert hosts.start().wait(90) == [0, 0], hosts.err() + hosts.err(1)
    assert "[monarch] pre-flight: 2 hosts are alike" in hosts.out() + hosts.err()
    assert "rank 1 runs" in hosts.out(1)


def test_every_difference_is_named_and_no_rank_starts(
    new_hosts: Callable[[], tuple[Network, Hosts]], tmp_path: Path
) -> None:
    machines, hosts = new_hosts()
    loop = tmp_path / "loop"  # root may read everything else
    loop.symlink_to(loop)
    hosts.within[1] = (*machines.within(1), "env", f"PYTHONPATH={loop}")
    assert hosts.start().wait(90) == [1, 1], hosts.err() + hosts.err(1)
    log = [line for line in (hosts.out() + hosts.err()).splitlines() if "[monarch] pre-flight: " in line]
    assert any("host 1 (" in line and f"cannot read {loop}: Too many levels" in line for line in log), log
    assert not any("host 0 (" in line and "cannot read" in line for line in log), log
    assert "runs" not in hosts.out() + hosts.out(1)


def test_without_it_the_log_says_once_how_hosts_differ(
    network: Callable[[int], Network], networked: Callable[..., Hosts], tmp_path: Path
) -> None:
    for machine, line in enumerate(("", "# older")):
        (tmp_path / str(machine)).mkdir()
        (tmp_path / str(machine) / "prog.py").write_text(f"import os\nos._exit(int(os.environ['RANK']))\n{line}")
    machines = network(2)
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "prog.py"]
    hosts = networked(machines, command, options=("--grace", "5", "--preload", "sqlite3"))
    hosts.within = {k: (*machines.within(k), "env", "-C", str(tmp_path / str(k))) for k in range(2)}
    assert hosts.start().wait(90) == [1, 1], hosts.err() + hosts.err(1)
    lines = [line for line in (hosts.out() + hosts.err()).splitlines() if "hosts differ" in line]
    (line,) = lines
    assert line.startswith("[monarch] hosts differ: host 1 (") and " has the program " in line and "; copy the" in line
    assert '"kind": "differences"' in (hosts.folder / "events.jsonl").read_text()
