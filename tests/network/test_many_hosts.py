# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many hosts at once: simulated on one machine by the benchmark, and real ones that lose one of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.network.namespaces import Network, requires_namespaces

BENCH = Path(__file__).parents[2] / "bench" / "rendezvous.py"


def test_64_hosts_register_over_tls_and_learn_the_result(tmp_path: Path) -> None:
    table = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--hosts", "64", "--rounds", "1", "--alive", "0.1", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    (sample,) = json.loads(table.read_text())["hosts"]["64"]
    assert sample["retries"] == 0  # nobody was sent away, or had to wait for too long
    assert 0 < sample["memory"] < 160  # KiB of replica 0 for each host; asyncio's own buffers alone would be 256
    assert sample["result"] < 30


_SLEEPS_UNTIL_THE_FILE_IS_THERE = (
    'echo "attempt $TORCHELASTIC_RESTART_COUNT world $WORLD_SIZE rank $RANK"; while [ ! -e "$0" ]; do sleep 2; done'
)


class Phases:
    """The wall time and processor time of the phases of a test, shown with ``pytest -s``."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), self._used()

    @staticmethod
    def _used() -> float:
        """Seconds of processor time of the whole machine: hosts that run have not been waited for."""
        ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(int(ticks[each]) for each in (0, 1, 2, 5, 6)) / 100

    def end(self, name: str) -> None:
        """Print what the phase has taken; the next one begins."""
        wall, cpu = time.monotonic(), self._used()
        print(f"{name}: {wall - self._wall:.1f} s, {cpu - self._cpu:.1f} s of CPU", flush=True)
        self._wall, self._cpu = wall, cpu


@requires_namespaces
@pytest.mark.parametrize(
    "count", [8, pytest.param(64, marks=pytest.mark.nightly("two minutes of both processors; 8 hosts do the same"))]
)
def test_many_machines_lose_one_go_on_with_its_replacement_and_end(
    network: Callable[[int], Network],
    networked: Callable[..., Hosts],
    eventually: Callable[..., object],
    tmp_path: Path,
    count: int,
) -> None:
    phases = Phases()
    machines = network(count)
    phases.end(f"{count} namespaces")
    done = tmp_path / "done"
    program = ["--no-python", "sh", "-c", _SLEEPS_UNTIL_THE_FILE_IS_THERE, str(done)]
    command = ["torchrun", "--nnodes", str(count), "--nproc-per-node", "1", "--tee", "3", *program]
    options = ("--grace", "5", "--preload", "", "--replacements", "1", "--rejoin-timeout", "300")
    hosts = networked(machines, command, count, options=options).start()

    def in_attempt(number: int) -> bool:
        line = f"attempt {number} world {count} rank "
        assert hosts.processes[0].poll() is None, hosts.err()
        return all(line in hosts.out(replica) for replica in range(count))

    eventually(lambda: in_attempt(0), "the first attempt", 300)
    phases.end("start")
    lost = count // 2
    hosts.processes[lost].send_signal(signal.SIGKILL)
    hosts.processes[lost].wait(60)
    hosts.start(lost)
    eventually(lambda: in_attempt(1), "the second attempt", 300)
    phases.end("recovery")
    status = Path(f"/proc/{hosts.processes[0].pid}/status").read_text()
    print(*re.findall(r"(?:VmRSS|Threads):.*", status), sep=", ")
    done.touch()
    assert set(hosts.wait(300)) == {0}, hosts.err()
    phases.end("end")
    numbers = {re.search(rf"attempt 1 world {count} rank (\d+)", hosts.out(each))[1] for each in range(count)}  # type: ignore[index]
    assert numbers == {str(each) for each in range(count)}
    assert "attempt 2" not in "".join(hosts.out(each) for each in range(count))
