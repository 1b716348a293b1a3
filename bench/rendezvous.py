# SPDX-License-Identifier: BSD-3-Clause
"""The rendezvous of many hosts over mutual TLS: ``python bench/rendezvous.py [--hosts N ...] [--rounds N]``.

Replica 0's end, the real server, has a process of its own; the other hosts are simulated in this one, with one
certificate of the job's authority. So two cores do the work of N machines. Real hosts answer within milliseconds, each
for itself, and wait in the kernel's queue until replica 0 takes them; this one process could not answer for thousands
in time, so that only ``--at-once`` of them connect at a time. What only thousands of hosts in one process cost is left
out of their time: its garbage collector is off, as each real host has next to nothing to collect, and they begin to
watch replica 0's lease, each with a timer every second, when all are registered. What the columns say, as medians over
the rounds:

    registered   seconds from the start of the first connection until the last host knows that it is registered
    per host     that divided by the number of hosts, in milliseconds
    growth       per host, divided by that of the smallest number of hosts that is 64 or more; 1 is linear
    server CPU   seconds of CPU that replica 0 used for it
    hosts CPU    the same of all simulated hosts together
    retries      how often one of them was sent away or lost its patience, and tried again
    attempt      seconds of CPU in which replica 0 forms an elastic attempt of all hosts and looks for newcomers
    KiB a host   memory of replica 0 for each registered host
    alive        CPU that signs of life cost replica 0, in percent of a core (each host sends one every 15 s)
    result       seconds from the result until the last host knows it

Apart from that: the seconds in which a host makes its certificate, which every real one does for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import AsyncMock

from torchx_monarch.controller.elastic import HostFailures, HostGatherer, NodeRange
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.system.console import Console
from torchx_monarch.system.processes import raise_file_limit
from torchx_monarch.transport import credentials
from torchx_monarch.transport.connections import Address, ConnectError, Identity

TIMEOUT = 60.0
NAME = "127.0.0.1"


class BenchError(Exception):
    """A host did not do what is measured; the message is for the person at the screen."""


@dataclasses.dataclass(frozen=True)
class Server:
    """What replica 0 has measured; times are of the monotonic clock, which all processes of a machine share."""

    cpu: float
    attempt: float
    memory: float
    alive: float
    announced: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """One round; units as in the table."""

    registered: float
    server_cpu: float
    hosts_cpu: float
    retries: int
    attempt: float
    memory: float
    alive: float
    result: float


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind((NAME, 0))
        return int(sock.getsockname()[1])


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(pipe: Connection, address: Address, identity: Identity, replicas: int, alive: float) -> None:
    """The process of replica 0: says ``None`` when it listens, and at the end what it has measured."""
    raise_file_limit()
    gc.set_threshold(50_000)  # as every host process
    pipe.send(asyncio.run(_serve(pipe, address, identity, replicas, alive)))


async def _serve(pipe: Connection, address: Address, identity: Identity, replicas: int, alive: float) -> Server:
    rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=replicas), bind=NAME, identity=identity))
    await rendezvous.start()
    rendezvous.register(Registration(0, "bench", os.getpid()))
    pipe.send(None)
    cpu, memory = time.process_time(), resident()
    await asyncio.wait_for(rendezvous.members.until(lambda: rendezvous.members.able_count == replicas), TIMEOUT)
    cpu, memory = time.process_time() - cpu, resident() - memory
    sizes = NodeRange(2, replicas, TIMEOUT)
    reporter = Reporter(Console(os.open(os.devnull, os.O_WRONLY)), None, "bench")
    gatherer = HostGatherer(sizes, rendezvous.members, reporter, HostFailures(3))
    before = time.process_time()
    await gatherer.gather(0.0)
    if gatherer.newcomers():
        raise BenchError(f"{replicas} hosts: not all of them take part")
    attempt = time.process_time() - before
    before = time.process_time()
    await asyncio.sleep(alive)
    share = 100 * (time.process_time() - before) / alive
    announced = time.monotonic()
    await rendezvous.announce(JobResult(0, "the end of the benchmark"), TIMEOUT)
    return Server(cpu, attempt, memory / 1024 / replicas, share, announced)


async def hosts(address: Address, identity: Identity, replicas: int, at_once: int) -> tuple[float, float, float, int]:
    """All other hosts, from their first try to connect to the result.

    Returns:
        seconds and seconds of CPU until all were registered, when the last of them knew the result, failed tries.

    Raises:
        BenchError: one could not register, or lost replica 0.
    """
    started, cpu = time.monotonic(), time.process_time()
    registered: list[tuple[float, float]] = []
    failures: dict[str, int] = {}

    def failed(error: ConnectError) -> None:
        failures[str(error)] = failures.get(str(error), 0) + 1

    connecting, all_registered = asyncio.Semaphore(at_once), asyncio.Event()

    async def host(replica: int) -> float:
        registration = Registration(replica, "bench", os.getpid())
        try:
            async with connecting:
                network = HostNetwork(address, identity=identity)
                rendezvous_client = await RendezvousClient.join(network, registration, TIMEOUT, failed)
        except RendezvousError as error:
            raise BenchError(f"{replicas} hosts, host {replica}: {error}; before: {failures}") from None
        registered.append((time.monotonic() - started, time.process_time() - cpu))
        if len(registered) == replicas - 1:
            all_registered.set()
        await all_registered.wait()
        if await rendezvous_client.result(AsyncMock()) is None:
            raise BenchError(f"{replicas} hosts: host {replica} lost replica 0")
        return time.monotonic()

    told = await asyncio.gather(*(host(replica) for replica in range(1, replicas)))
    return (*max(registered), max(told), sum(failures.values()))


def once(identity: Identity, replicas: int, alive: float, at_once: int) -> Sample:
    """Bring up so many hosts, keep them for ``alive`` seconds and tell them the result."""
    address = Address("tls", NAME, free_port())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, address, identity, replicas, alive), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        gc.collect()
        gc.disable()
        registered, cpu, told, retries = asyncio.run(hosts(address, identity, replicas, at_once))
        server: Server = ours.recv()
        process.join(TIMEOUT)
    except EOFError:
        raise BenchError(f"{replicas} hosts: the process of replica 0 has ended") from None
    finally:
        gc.enable()
        process.kill()
    result = told - server.announced
    return Sample(registered, server.cpu, cpu, retries, server.attempt, server.memory, server.alive, result)


def minting(authority: credentials.HostCredentials, rounds: int = 50) -> float:
    """Seconds in which a host makes its certificate: the median."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        authority.sign({"node7", "10.0.0.7", "node0.example"})
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def report(samples: dict[int, list[Sample]]) -> str:
    """The table; numbers of hosts in ascending order."""

    def median(taken: Sequence[Sample], name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in taken))

    base = min((number for number in samples if number >= 64), default=min(samples))
    base_cost = median(samples[base], "registered") / base
    rows = [
        "hosts  registered  (least-greatest)  per host  growth  server CPU  hosts CPU  retries  attempt  KiB a host"
    ]
    rows[0] += "  alive   result"
    for number, taken in sorted(samples.items()):
        times = [sample.registered for sample in taken]
        cost = median(taken, "registered") / number
        rows.append(
            f"{number:>5}  {median(taken, 'registered'):>10.2f}  {f'({min(times):.2f}-{max(times):.2f})':>16}  "
            f"{1000 * cost:>8.2f}  {cost / base_cost:>6.2f}  {median(taken, 'server_cpu'):>10.2f}  "
            f"{median(taken, 'hosts_cpu'):>9.2f}  {median(taken, 'retries'):>7.0f}  "
            f"{median(taken, 'attempt'):>7.3f}  {median(taken, 'memory'):>10.0f}  "
            f"{median(taken, 'alive'):>5.1f}%  {median(taken, 'result'):>7.3f}"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [16, 64, 256, 1024, 4096]
    parser.add_argument("--hosts", type=int, nargs="+", default=sizes, help="numbers of hosts (default: 16 to 4096)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--alive", type=float, default=15.0, help="seconds that all are alive (default: 15)")
    parser.add_argument("--at-once", type=int, default=256, help="hosts that connect at a time (default: 256)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    if min(args.hosts) < 2 or min(args.rounds, args.at_once) < 1 or args.alive <= 0:
        parser.error("--hosts must be 2 or more, --rounds and --at-once 1 or more, --alive more than 0")
    raise_file_limit()
    authority, _ = credentials.create()
    mint = minting(authority)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}; a host's certificate takes {1000 * mint:.2f} ms")
    samples: dict[int, list[Sample]] = {number: [] for number in args.hosts}
    with tempfile.TemporaryDirectory() as folder:
        identity = Identity.from_credentials(authority, {NAME}, folder)
        for _ in range(args.rounds):
            for number in samples:
                try:
                    samples[number].append(once(identity, number, args.alive, args.at_once))
                except BenchError as error:
                    sys.exit(f"bench/rendezvous.py: {error}")
    print(report(samples))
    if args.json:
        everything = {
            str(number): [dataclasses.asdict(measurement) for measurement in taken] for number, taken in samples.items()
        }
        args.json.write_text(json.dumps({"certificate": mint, "hosts": everything}, indent=1))


if __name__ == "__main__":
    main()
