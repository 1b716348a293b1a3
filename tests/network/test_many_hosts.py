# SPDX-License-Identifier: BSD-3-Clause
"""Many hosts at once: simulated on one machine by the benchmark, and real ones that lose one of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.network.namespaces import Network, requires_namespaces
from tests.waits import WITHIN, until

BENCH = Path(__file__).parents[2] / "bench" / "rendezvous.py"


@pytest.mark.nightly("15 s of processor time; 8 real hosts register every time")
def test_64_hosts_register_over_tls_and_learn_the_result(tmp_path: Path) -> None:
    table = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--hosts", "64", "--rounds", "1", "--alive", "0.1", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    (sample,) = json.loads(table.read_text())["hosts"]["64"]
    assert 0 < sample["memory"] < 160  # KiB of replica 0 for each host; asyncio's own buffers alone would be 256
    assert sample["retries"] >= 0 and sample["result"] > 0


_SLEEPS_UNTIL_THE_FILE_IS_THERE = (
    'echo "attempt $TORCHELASTIC_RESTART_COUNT world $WORLD_SIZE rank $RANK"; while [ ! -e "$0" ]; do sleep 2; done'
)


@requires_namespaces
@pytest.mark.parametrize(
    "count", [8, pytest.param(64, marks=pytest.mark.nightly("two minutes of both processors; 8 hosts do the same"))]
)
def test_many_machines_lose_one_go_on_with_its_replacement_and_end(
    network: Callable[[int], Network],
    networked: Callable[..., Hosts],
    tmp_path: Path,
    count: int,
) -> None:
    machines = network(count)
    done = tmp_path / "done"
    program = ["--no-python", "sh", "-c", _SLEEPS_UNTIL_THE_FILE_IS_THERE, str(done)]
    command = ["torchrun", "--nnodes", str(count), "--nproc-per-node", "1", "--tee", "3", *program]
    options = ("--grace", "5", "--preload", "", "--replacements", "1", "--rejoin-timeout", "300")
    hosts = networked(machines, command, count, options=options).start()

    def in_attempt(number: int) -> bool:
        line = f"attempt {number} world {count} rank "
        assert hosts.processes[0].poll() is None, hosts.err()
        return all(line in hosts.out(replica) for replica in range(count))

    until(lambda: in_attempt(0), "the first attempt", 300)
    lost = count // 2
    hosts.processes[lost].send_signal(signal.SIGKILL)
    hosts.processes[lost].wait(WITHIN)
    hosts.start(lost)
    until(lambda: in_attempt(1), "the second attempt", 300)
    done.touch()
    assert set(hosts.wait(300)) == {0}, hosts.err()
    numbers = {re.search(rf"attempt 1 world {count} rank (\d+)", hosts.out(number))[1] for number in range(count)}  # type: ignore[index]
    assert numbers == {str(number) for number in range(count)}
    assert "attempt 2" not in "".join(hosts.out(number) for number in range(count))
