# SPDX-License-Identifier: BSD-3-Clause
"""Many hosts at once: simulated on one machine by the benchmark, and real ones that lose one of them."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
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
    assert 0 < sample["memory"] < 160  # KiB of replica 0 for each host; asyncio's own buffers alone would be 256
    assert sample["retries"] >= 0 and sample["result"] > 0


_SLEEPS_UNTIL_THE_FILE_IS_THERE = (
    'echo "attempt $TORCHELASTIC_RESTART_COUNT world $WORLD_SIZE rank $RANK"; while [ ! -e "$0" ]; do sleep 2; done'
)


class Phases:
    """The wall time of the phases of a test, and the processor time of its hosts and their ranks; for ``pytest -s``."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._cpu = 0.0
        self._before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def end(self, name: str, running: Iterable[int] = ()) -> None:
        """Print what the phase has taken; the next one begins.

        Args:
            name: name of the phase.
            running: pids of hosts that have not been waited for.
        """
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = now.ru_utime - self._before.ru_utime + now.ru_stime - self._before.ru_stime
        for pid in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                host = psutil.Process(pid)
                cpu += sum(sum(one.cpu_times()[:4]) for one in (host, *host.children(recursive=True)))
        wall = time.monotonic()
        # Nobody waits for the zygote of a host that was killed, so that the last phase may end with less.
        print(f"{name}: {wall - self._wall:.1f} s, {max(0.0, cpu - self._cpu):.1f} s of CPU", flush=True)
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

    def pids() -> list[int]:
        return [process.pid for process in hosts.processes.values()]

    def in_attempt(number: int) -> bool:
        line = f"attempt {number} world {count} rank "
        assert hosts.processes[0].poll() is None, hosts.err()
        return all(line in hosts.out(replica) for replica in range(count))

    eventually(lambda: in_attempt(0), "the first attempt", 300)
    phases.end("start", pids())
    lost = count // 2
    hosts.processes[lost].send_signal(signal.SIGKILL)
    hosts.processes[lost].wait(60)
    hosts.start(lost)
    eventually(lambda: in_attempt(1), "the second attempt", 300)
    phases.end("recovery", pids())
    status = Path(f"/proc/{hosts.processes[0].pid}/status").read_text()
    print(*re.findall(r"(?:VmRSS|Threads):.*", status), sep=", ")
    done.touch()
    assert set(hosts.wait(300)) == {0}, hosts.err()
    phases.end("end")
    numbers = {re.search(rf"attempt 1 world {count} rank (\d+)", hosts.out(each))[1] for each in range(count)}  # type: ignore[index]
    assert numbers == {str(each) for each in range(count)}
    assert "attempt 2" not in "".join(hosts.out(each) for each in range(count))
