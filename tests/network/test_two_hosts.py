# SPDX-License-Identifier: BSD-3-Clause
"""Jobs and live allocations whose hosts are on machines of their own, their pre-flight, and many hosts at once."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import torchx_monarch
from tests.local.hosts import Hosts
from tests.network.conftest import PORT
from tests.network.namespaces import Network, requires_namespaces
from tests.network.relay import Relay
from tests.waits import WITHIN, until
from torchx_monarch.client import hosts as client_hosts
from torchx_monarch.client.connection import Target, ask
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.transport import credentials
from torchx_monarch.transport.address import Address

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
    options = ("--grace", "5", "--preload", "", "--replacements", "1", "--rejoin-timeout", "15", "--lease", "5")
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
        how = r"host 0 \(.*\) (was lost: the network broke its connection|does not answer): "
        assert re.search(how, hosts.err(1))


def test_goes_on_in_the_same_processes_after_a_cut_shorter_than_the_lease(
    network: Callable[[int], Network], networked: Callable[..., Hosts], tmp_path: Path
) -> None:
    machines, done = network(2), tmp_path / "done"
    program = ["--no-python", "sh", "-c", _SLEEPS_UNTIL_THE_FILE_IS_THERE, str(done)]
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--tee", "3", *program]
    options = ("--grace", "5", "--preload", "", "--lease", "30")
    hosts = networked(machines, command, options=options).start()
    until(lambda: all("attempt 0" in hosts.out(replica) for replica in (0, 1)), "the ranks")
    machines.cut(1)
    until(
        lambda: "(no answer for 5 s); it is lost unless it connects again within 30 s (lease)" in hosts.err(0),
        "the cut",
    )
    machines.adapt(1)
    until(lambda: re.search(r"host 1 \(.*\): it has connected again", hosts.err(0)), "the next connection")
    done.touch()
    assert hosts.wait() == [0, 0], hosts.err() + hosts.err(1)
    assert hosts.out(1).count("attempt 0") == 1 and "restart" not in hosts.err(0)


BENCH = Path(__file__).parents[2] / "bench" / "rendezvous.py"


@pytest.mark.nightly("15 s of processor time; 8 real hosts register every time")
def test_64_hosts_register_over_tls_lose_one_start_again_and_learn_the_result(tmp_path: Path) -> None:
    table = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--hosts", "64", "--rounds", "1", "--alive", "0.1", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    (sample,) = json.loads(table.read_text())["hosts"]["64"]
    assert 0 < sample["server"]["memory"] < 10  # MiB of replica 0; asyncio's own buffers alone would be 16
    assert all(seconds > 0 for seconds in sample["server"]["wall"].values())


_SLEEPS_UNTIL_THE_FILE_IS_THERE = (
    'echo "attempt $TORCHELASTIC_RESTART_COUNT world $WORLD_SIZE rank $RANK"; while [ ! -e "$0" ]; do sleep 2; done'
)


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
