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
) -> Callable[..., Hosts]:
    """Makes hosts, which are not started, on machines whose scripts end with these lines."""

    def make(text: str, *lines: str, options: tuple[str, ...] = ()) -> Hosts:
        for machine, line in enumerate(lines):
            (tmp_path / str(machine)).mkdir()
            (tmp_path / str(machine) / "prog.py").write_text(f"{text}\n{line}")
        machines = network(2)
        command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--tee", "3", "prog.py"]
        hosts = networked(machines, command, options=("--grace", "5", *options))
        hosts.within = {k: (*machines.within(k), "env", "-C", str(tmp_path / str(k))) for k in range(2)}
        return hosts

    return make


def test_hosts_that_are_alike_run(new_hosts: Callable[..., Hosts]) -> None:
    hosts = new_hosts("print('runs', flush=True)", "", "", options=("--preload", "", "--preflight", "on"))
    assert hosts.start().wait() == [0, 0], hosts.err() + hosts.err(1)
    assert "[monarch] pre-flight: 2 hosts are alike" in hosts.out() + hosts.err()
    assert "runs" in hosts.out(1)


def test_every_difference_is_named_and_no_rank_starts(new_hosts: Callable[..., Hosts]) -> None:
    hosts = new_hosts("print('runs', flush=True)", "", "# older", options=("--preload", "", "--preflight", "on"))
    assert hosts.start().wait() == [1, 1], hosts.err() + hosts.err(1)
    (line,) = {line for line in (hosts.out() + hosts.err()).splitlines() if "[monarch] pre-flight: host" in line}
    assert "pre-flight: host 1 (" in line and " has the program " in line
    assert "runs" not in hosts.out() + hosts.out(1)


def test_without_it_the_log_says_once_how_hosts_differ(new_hosts: Callable[..., Hosts]) -> None:
    hosts = new_hosts("import os\nos._exit(int(os.environ['RANK']))", "", "# older", options=("--preload", "sqlite3"))
    assert hosts.start().wait() == [1, 1], hosts.err() + hosts.err(1)
    lines = [line for line in (hosts.out() + hosts.err()).splitlines() if "hosts differ" in line]
    (line,) = lines
    assert line.startswith("[monarch] hosts differ: host 1 (") and " has the program " in line and "; copy the" in line
    assert '"kind": "differences"' in (hosts.folder / "events.jsonl").read_text()
