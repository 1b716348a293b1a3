# SPDX-License-Identifier: BSD-3-Clause
"""A job of many hosts over mutual TLS: ``python bench/rendezvous.py [--hosts N ...] [--rounds N]``.

Replica 0, the real controller of an elastic job with its server, has a process of its own. The other hosts, of one
rank each, are simulated in this process, with one certificate of the job's authority, and answer its requests at once.
So two cores do the work of N machines. Real hosts wait in the kernel's queue until replica 0 takes them; this one
process could not answer for thousands in time, so that only ``--at-once`` of them connect at a time. What only
thousands of hosts in one process cost is left out: its garbage collector is off, and one timer sends the heartbeats of
all. The columns, medians over the rounds, are seconds, and in brackets seconds of processor time of replica 0:

    registered   from the start of the first connection until replica 0 has all hosts
    start        from then until all ranks have started
    restart      from the loss of a host until all ranks of the others have ended and started again
    end          from the end of the ranks until the last host knows the result of the job, and has left
    total        of these
    growth       processor time of replica 0 per host, divided by that of the smallest number of hosts; 1 is linear
    hosts        processor time of all simulated hosts together
    retries      how often one of them was sent away or lost its patience, and tried again
    MiB          memory of replica 0 for its hosts when all ranks have started
    alive        processor time that heartbeats cost replica 0, in percent of a core (each host sends one every 15 s)

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchx_monarch.controller.controller import Controller
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_messages import (
    BeginRun,
    CheckpointParts,
    Launched,
    LaunchRanks,
    ListCheckpoints,
    OpenStore,
    ReadCollectives,
    Request,
    RunBegun,
    StopRanks,
    StoreOpened,
    WatchRanks,
)
from torchx_monarch.controller.host_network import HostNetwork, RendezvousError
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.insight.hangs import HostCollectives
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.system.console import Console
from torchx_monarch.system.processes import raise_file_limit
from torchx_monarch.transport import credentials
from torchx_monarch.transport.channel import Channel
from torchx_monarch.transport.connections import Address, ConnectError, Identity
from torchx_monarch.transport.lease import Leases

TIMEOUT = 300.0
NAME = "127.0.0.1"
PHASES = ("registered", "start", "restart", "end")


class BenchError(Exception):
    """A host did not do what is measured; the message is for the person at the screen."""


@dataclasses.dataclass(frozen=True)
class Server:
    """What replica 0 has measured: the seconds, and those of processor time, of each phase; units as in the table."""

    wall: dict[str, float]
    cpu: dict[str, float]
    memory: float
    alive: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """One round; units as in the table."""

    server: Server
    hosts_cpu: float
    retries: int


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind((NAME, 0))
        return int(sock.getsockname()[1])


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class SimulatedHost:
    """The answers of a host with one rank, which runs until ``ended`` is set."""

    def __init__(self, replica: int, ended: asyncio.Event) -> None:
        self.replica, self.ended, self.rank = replica, ended, 0

    async def handle(self, request: Request[Any]) -> Any:
        """Execute a request of the controller."""
        match request:
            case BeginRun():
                return RunBegun(1, "bench", 0, 1.0)
            case OpenStore():
                return StoreOpened(NAME, 29500, True)
            case LaunchRanks():
                self.rank = request.world.place(self.replica).first_rank
                return Launched((4711,), facts={"python": "3.11.7", "torch": "2.13.0"})
            case WatchRanks():
                await self.ended.wait()
                return [self._exit(0, None)]
            case ReadCollectives():
                return HostCollectives(0.0)
            case ListCheckpoints():
                return CheckpointParts((), "")
            case StopRanks():
                return [self._exit(-request.signal, time.time())]
        raise BenchError(f"no simulated host answers {request}")

    def _exit(self, code: int, stopped_at: float | None) -> RankExit:
        return RankExit(self.rank, 0, self.replica, "bench", 4711, code, time.time(), stopped_at)


class Phases(SimulatedHost):
    """The host of replica 0, whose requests show when a phase ends."""

    def __init__(self, pipe: Connection, replicas: int, alive: float) -> None:
        super().__init__(0, asyncio.Event())
        self.wall, self.cpu = dict[str, float](), dict[str, float]()
        self.memory, self.alive = float(resident()), 0.0
        self._pipe, self._seconds = pipe, alive
        self._since = time.monotonic(), time.process_time()

    def begin(self) -> None:
        self._since = time.monotonic(), time.process_time()

    def end(self, phase: str) -> None:
        started, cpu = self._since
        self.wall[phase], self.cpu[phase] = time.monotonic() - started, time.process_time() - cpu
        self.begin()

    async def handle(self, request: Request[Any]) -> Any:
        """Execute a request of the controller, and measure."""
        if isinstance(request, BeginRun) and "start" not in self.wall:
            self.end("registered")
        if isinstance(request, StopRanks):
            self.begin()
        if isinstance(request, WatchRanks):
            if "start" not in self.wall:
                self.end("start")
                self.memory = (resident() - self.memory) / (1 << 20)
                await asyncio.sleep(self._seconds)
                self.alive = 100 * (time.process_time() - self._since[1]) / self._seconds
                self._pipe.send("leave")  # one of them; this request is repeated in the next attempt
            else:
                self.end("restart")
                self._pipe.send("end")
                self.ended.set()
        return await super().handle(request)


def serve(pipe: Connection, address: Address, identity: Identity, replicas: int, alive: float) -> None:
    """The process of replica 0: says ``None`` when it listens, and at the end what it has measured."""
    raise_file_limit()
    gc.set_threshold(50_000)  # as every host process
    pipe.send(asyncio.run(_serve(pipe, address, identity, replicas, alive)))


async def _serve(pipe: Connection, address: Address, identity: Identity, replicas: int, alive: float) -> Server:
    spec = HostSpec(replicas=replicas, min_replicas=2, host_timeout=TIMEOUT, hang_after=0.0)
    rendezvous = Rendezvous(HostNetwork(address, spec, bind=NAME, identity=identity), min_hosts=2)
    phases = Phases(pipe, replicas, alive)
    sizes = NodeRange(2, replicas, TIMEOUT, last_call=TIMEOUT)
    reporter = Reporter(Console(os.open(os.devnull, os.O_WRONLY)), None, "bench")
    job_hosts = JobHosts(rendezvous, sizes, reporter, phases.handle)
    controller = Controller(job_hosts, HangWatch(job_hosts))
    await rendezvous.start()
    rendezvous.register(Registration(0, "bench", os.getpid()))
    pipe.send(None)
    phases.begin()
    result = await controller.run()
    if result.code:
        raise BenchError(f"{replicas} hosts: {result.reason}")
    await rendezvous.announce(result, TIMEOUT)
    if rendezvous.members.connected:
        raise BenchError(f"{replicas} hosts: not all of them have left")
    phases.end("end")
    return Server(phases.wall, phases.cpu, phases.memory, phases.alive)


class SharedLeases(Leases):
    """The leases of all simulated hosts, with one timer."""

    def start(self) -> None:
        if self._watching is None:
            super().start()

    def stop(self) -> None:
        pass


async def hosts(pipe: Connection, address: Address, identity: Identity, replicas: int, at_once: int) -> int:
    """All other hosts, from their first try to connect to the result; returns the number of tries that failed.

    Raises:
        BenchError: one could not register, or lost replica 0.
    """
    failures: dict[str, int] = {}

    def failed(error: ConnectError) -> None:
        failures[str(error)] = failures.get(str(error), 0) + 1

    channels: list[Channel] = []
    leases = SharedLeases(HostSpec().lease, lambda: channels, sends=True)
    connecting, ended = asyncio.Semaphore(at_once), asyncio.Event()

    def obey() -> None:
        if pipe.recv() == "leave":
            channels.pop().close()
        else:
            ended.set()
            asyncio.get_running_loop().remove_reader(pipe.fileno())

    async def host(replica: int) -> None:
        registration = Registration(replica, "bench", os.getpid())
        try:
            async with connecting:
                network = HostNetwork(address, identity=identity)
                rendezvous_client = await RendezvousClient.join(network, registration, TIMEOUT, failed)
        except RendezvousError as error:
            raise BenchError(f"{replicas} hosts, host {replica}: {error}; before: {failures}") from None
        rendezvous_client._leases = leases
        channel = rendezvous_client._channel
        channels.append(channel)
        result = await rendezvous_client.result(SimulatedHost(replica, ended).handle)
        if channel in channels[-1:] or result is not None:
            channel.close()
        elif channel in channels:
            raise BenchError(f"{replicas} hosts: host {replica} lost replica 0: {rendezvous_client.lost}")

    asyncio.get_running_loop().add_reader(pipe.fileno(), obey)
    await asyncio.gather(*(host(replica) for replica in range(1, replicas)))
    return sum(failures.values())


def once(identity: Identity, replicas: int, alive: float, at_once: int) -> Sample:
    """Run a job of so many hosts, and keep them for ``alive`` seconds."""
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
        cpu = time.process_time()
        retries = asyncio.run(hosts(ours, address, identity, replicas, at_once))
        server: Server = ours.recv()
        process.join(TIMEOUT)
        return Sample(server, time.process_time() - cpu, retries)
    except EOFError:
        raise BenchError(f"{replicas} hosts: the process of replica 0 has ended") from None
    finally:
        gc.enable()
        process.kill()


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
    smallest = min(samples)
    costs = {
        number: statistics.median(sum(sample.server.cpu.values()) for sample in taken) / number
        for number, taken in samples.items()
    }
    rows = [
        f"{'hosts':>5}"
        + "".join(f"{phase:>18}" for phase in (*PHASES, "total"))
        + "  growth   hosts  retries   MiB  alive"
    ]
    for number, taken in sorted(samples.items()):
        times = [(sample.server.wall, sample.server.cpu) for sample in taken]
        cells = [
            [
                statistics.median(sum(clock[phase] for phase in phases) for clock in clocks)
                for clocks in zip(*times, strict=True)
            ]
            for phases in (*((phase,) for phase in PHASES), PHASES)
        ]
        rows.append(
            f"{number:>5}"
            + "".join(f"{f'{wall:.2f} ({cpu:.2f})':>18}" for wall, cpu in cells)
            + f"{costs[number] / costs[smallest]:>8.2f}"
            f"{statistics.median(sample.hosts_cpu for sample in taken):>8.2f}"
            f"{statistics.median(sample.retries for sample in taken):>9.0f}"
            f"{statistics.median(sample.server.memory for sample in taken):>6.0f}"
            f"{statistics.median(sample.server.alive for sample in taken):>6.1f}%"
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
