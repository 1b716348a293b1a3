# SPDX-License-Identifier: BSD-3-Clause
"""What a host process runs for its role: the run of a batch job, or the runs of a live allocation."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

from torchx_monarch.command.command import Command, CommandError
from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.debug_sessions import DebugSessions
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_messages import (
    Answer,
    CollectivesRead,
    FactsTaken,
    GetWorkerLoop,
    Launched,
    LaunchRanks,
    OpenStore,
    RanksExited,
    RanksSampled,
    ReadCollectives,
    Refused,
    Request,
    RunWorkerLoop,
    SampleRanks,
    StacksTaken,
    StopRanks,
    StoreOpened,
    TakeFacts,
    TakeStacks,
    WatchRanks,
)
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.mesh_clients import MeshClients
from torchx_monarch.controller.preflight import Preflight
from torchx_monarch.controller.rank_queries import HostQueries, SampleRecorder
from torchx_monarch.controller.session import Session, SpmdWork
from torchx_monarch.host.attach_relay import AttachRelay
from torchx_monarch.host.preflight import take_facts
from torchx_monarch.host.ranks.rank_pool import RankPool
from torchx_monarch.host.worker_loops import WorkerLoops
from torchx_monarch.host.workload import Control, Host
from torchx_monarch.insight.sample_log import NAME, SampleLog
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.world import LaunchError


class Runs(Protocol):
    """The runs of this host: ``BatchRun`` or ``LiveRuns``.

    Attributes:
        command: the torchrun or Python command that determines the number of hosts; None for the role's replicas.
        pool: the ranks of the present run; None if there are none yet.
        listens: whether replica 0 needs its listener even if it is the only host: what it runs comes from clients.
        first_output: set when a rank has printed something; None if that is not reported.
    """

    command: Command | None
    pool: RankPool | None
    listens: bool
    first_output: asyncio.Event | None

    def parse(self) -> Command:
        """Parse the role's command.

        Raises:
            CommandError: it is not valid.
        """

    async def start(self) -> int:
        """Prepare for the ranks and return their number, while their zygote imports its modules.

        Raises:
            LaunchError: the zygote cannot be started, or the number is not known.
        """

    def first_log_attempt(self, sizes: NodeRange) -> int:
        """Return the number of the first attempt's log folders."""

    def session(self, control: Control, hosts: JobHosts) -> Session:
        """Return the session in which the controller on replica 0 executes the runs."""

    def close(self) -> None:
        """End the runs at the end of the host process, after the ranks."""

    async def handle(self, request: Request) -> Answer:
        """Execute a request of live allocations, which ``SpmdWorkload`` does not know."""


_QUERIES = (TakeStacks, ReadCollectives, SampleRanks, TakeFacts, RunWorkerLoop, GetWorkerLoop)


class SpmdWorkload:
    """Execute the requests of the controller and, on replica 0, make its work.

    Attributes:
        runs: the runs of this host.

    Args:
        host: the host.
        runs: the runs of this host.
    """

    def __init__(self, host: Host, runs: Runs) -> None:
        self.runs = runs
        self._host = host
        self._loops: WorkerLoops | None = None

    async def connect(self, network: HostNetwork) -> None:
        """Prepare for worker loops, which start when a client attaches, and let ranks be such clients."""
        self._loops = WorkerLoops(self._host, network)
        await AttachRelay(self._host, network).start()

    def work(self, control: Control) -> SpmdWork:
        """Return the work of executing the session's runs, on replica 0."""
        options, events, reporter = control.options, control.rendezvous.events, self._host.reporter
        hosts = JobHosts(options, control.rendezvous.requests, events, reporter, self.handle)
        queries = HostQueries(hosts)
        control.rendezvous.clients.update(stacks=queries.stacks, samples=queries.samples)
        command = f"torchx monarch debug {self._host.options.app} --role {self._host.options.role}"
        hang_watch = HangWatch(hosts, reporter, options.hang_after, options.on_hang)
        sessions = DebugSessions(command, reporter.line, hang_watch.rest)
        control.rendezvous.clients.update(sessions.clients)
        self._host.connector = control.rendezvous.connect
        session = self.runs.session(control, hosts)
        clients = MeshClients(hosts, control.network, self._host.environ.get(CREDENTIALS, ""), reporter, session)
        control.rendezvous.clients["attach"] = clients.serve
        first_output = self.runs.first_output

        def new_attempts() -> Attempts:
            preflight = Preflight(options.preflight, hosts, reporter)
            return Attempts(options, hosts, control.gatherer, events, reporter, hang_watch, first_output, preflight)

        # Only where a command finds it again: beside the events of the job.
        samples_are_stored = "MONARCH_EVENTS" in self._host.environ and self._host.log_dir
        log = SampleLog(os.path.join(self._host.log_dir, NAME)) if samples_are_stored else None
        return SpmdWork(session, hosts, events, new_attempts, SampleRecorder(hosts, log))

    # -- requests of the controller ------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Answer:
        """Execute a request of the controller, or refuse it: a refusal ends the run, and not the hosts."""
        executing = asyncio.ensure_future(self._execute(request))
        executing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # Only a query may be cancelled: the zygote's next order would read the answer that is due to this one.
            return await (executing if isinstance(request, _QUERIES) else asyncio.shield(executing))
        except (CommandError, LaunchError) as error:
            reason, code = str(error), 2 if isinstance(error, CommandError) else 1
        except Exception as error:
            reason, code = repr(error), 1
        replica = self._host.options.replica
        return Refused(replica, f"host {replica} ({self._host.hostname})", reason, code)

    async def _execute(self, request: Request) -> Answer:
        pool, replica = self.runs.pool, self._host.options.replica
        assert pool is not None
        if isinstance(request, OpenStore):
            return StoreOpened(*await pool.serve_store(request.bind, request.advertised, request.hosts))
        if isinstance(request, LaunchRanks):
            return Launched(replica, tuple(await pool.launch(request.world)), pool.imported)
        if isinstance(request, TakeStacks):
            return StacksTaken(replica, tuple(await pool.stacks(request.rank, request.native, request.kept_as)))
        if isinstance(request, ReadCollectives):
            ranks = await pool.collectives()
            longest = max((rank.longest_wait for rank in ranks), default=0.0)
            return CollectivesRead(replica, longest, tuple(ranks) if request.details else ())
        if isinstance(request, SampleRanks):
            return RanksSampled(replica, tuple(await pool.samples(request.groups)))
        if isinstance(request, TakeFacts):
            facts = await asyncio.get_running_loop().run_in_executor(None, take_facts, pool.run)
            return FactsTaken(replica, facts)
        if isinstance(request, RunWorkerLoop):
            assert self._loops is not None
            return await self._loops.run(request.token)
        if isinstance(request, GetWorkerLoop):
            assert self._loops is not None
            return await self._loops.get(request.token)
        if isinstance(request, WatchRanks):
            await pool.watch()
        elif isinstance(request, StopRanks):
            await pool.stop(request.signal, request.grace)
        else:
            return await self.runs.handle(request)
        return RanksExited(replica, tuple(pool.exits()))
