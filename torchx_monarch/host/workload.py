# SPDX-License-Identifier: BSD-3-Clause
"""What a host executes for its role: the requests of the controller, which replica 0 makes from its own workload.

The other hosts register with replica 0. A host executes the ranks of a batch job or the runs of a live allocation
(``rank_runs.RankRuns``), or one process, that of a command (``command_run.CommandRun``).
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import functools
import signal
import traceback
from typing import TYPE_CHECKING, Any

from torchx_monarch.controller import host_messages
from torchx_monarch.controller.agreed_stop import seconds_to_stop
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_network import Peer, RendezvousError
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.host.host import Host
from torchx_monarch.host.ranks.process_pool import ProcessPool
from torchx_monarch.insight.stacks import shared_stacks
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.world import CommandError, LaunchError
from torchx_monarch.system import processes
from torchx_monarch.transport.connections import ConnectError

if TYPE_CHECKING:
    from torchx_monarch.command.command import Command
    from torchx_monarch.controller.commands import CommandController
    from torchx_monarch.controller.controller import Controller
    from torchx_monarch.controller.run_queue import RunQueue
    from torchx_monarch.host.worker_loops import WorkerLoops

_ERROR_REPORT_TIMEOUT = 10.0
"""Seconds for which a host that cannot take part tries to report its error to replica 0."""


class Workload(abc.ABC):
    """The workload of a host; ``pool`` has what runs at present.

    Attributes:
        command: the torchrun or Python command that determines the number of hosts; None before ``parse``, and where
            no ranks are run.
        listens: whether replica 0 needs its listener even if it is the only host: what it runs comes from clients.
        has_begun: whether it waits for no other host or role to begin.
    """

    listens = False
    has_begun = False

    def __init__(self, host: Host) -> None:
        self.command: Command | None = None
        self.pool: ProcessPool | None = None
        self._host = host
        self._has_printed = False

    @abc.abstractmethod
    def parse(self) -> None:
        """Parse the role's command; raise ``CommandError`` if it is not valid."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Prepare for the processes.

        Raises:
            LaunchError: they cannot be started, or the number is not known.
        """

    @abc.abstractmethod
    async def connect(self) -> None:
        """Listen for what runs on this host."""

    @property
    @abc.abstractmethod
    def sizes(self) -> NodeRange:
        """The number of hosts on which the job runs."""

    @abc.abstractmethod
    def controller(self, rendezvous: Rendezvous) -> Controller | CommandController:
        """Return the controller of the job on replica 0, and serve its clients."""

    def _serve_clients(self, hosts: JobHosts, queue: RunQueue | None = None) -> None:
        """Serve clients that ask what runs, and Monarch clients."""

        async def answer(peer: Peer) -> None:
            from torchx_monarch.controller.rank_clients import HostQueries

            await getattr(HostQueries(hosts), str(peer.greeting["type"]))(peer)

        async def attach(peer: Peer) -> None:
            from torchx_monarch.controller.mesh_clients import MeshClients

            await MeshClients(hosts, self._host.environ.get(CREDENTIALS, ""), queue).serve(peer)

        hosts.rendezvous.network.handlers.update(
            stacks=answer, profile=answer, samples=answer, events=answer, attach=attach
        )

    def close(self) -> None:
        """End the runs at the end of the host process, after the ranks."""
        if self.pool is not None:
            self.pool.close()

    async def stop(self, number: int, *, saves: bool = False) -> None:
        """Send a signal to what runs, and SIGKILL after the grace period; return when all has ended.

        ``saves``: ranks come to an agreed stop before, and those that have not ended get the signal from replica 0, or
        somewhat later from here.
        """
        if self.pool is None:
            return
        grace = self._host.grace
        first = (seconds_to_stop(grace) + grace) / 2 if saves else 0.0
        if saves:
            await self.pool.let_end(first)
        await self.pool.stop(number, grace - first)

    def _report_first_output(self) -> None:
        if self._host.options.replica == 0 and not (self.listens or self._has_printed):  # not that of a run
            self._has_printed = True
            self._host.reporter.phase("output", "first output")

    # -- a host other than replica 0 -----------------------------------------------------------------------------------

    async def follow(self, registration: Registration) -> JobResult:
        """Take part in the job of replica 0's controller; return its result, or the reason for not knowing it.

        If replica 0 is lost and the backend replaces it, the host stops its processes and registers with the new one.
        """
        host, lost = self._host, None
        while True:
            client = await self._join(registration, lost)
            if isinstance(client, JobResult):
                return client
            host.report = client.report
            result = await client.result(self.handle)
            if result is not None:
                if client.dismissed and not result.stopped:
                    host.reporter.line(f"host {registration.replica} was refused: {result.reason}")
                return result
            host.report = None
            lost = JobResult(1, client.lost, consequence=True, replica=0)
            host.reporter.line(lost.reason)
            if host.options.replacements == 0 or registration.error:
                return lost
            registration = await self._after_loss(registration)

    async def _join(self, registration: Registration, lost: JobResult | None) -> RendezvousClient | JobResult:
        """Register with replica 0, or with another one after a loss; return the result if there is none."""
        # A host with an error only reports it. If replica 0 has the same error, it has already exited.
        timeout, failure = self._host.options.rejoin_timeout if lost else self.sizes.join_timeout, ""
        timeout = min(timeout, _ERROR_REPORT_TIMEOUT) if registration.error else timeout
        whom = "another replica 0" if lost else "replica 0"

        def failed(error: ConnectError) -> None:
            nonlocal failure
            failure = f" ({error})"

        joining = RendezvousClient.join(self._host.network, registration, timeout, failed)
        try:
            return await self._host.reporter.while_waiting(joining, lambda: whom + failure)
        except RendezvousError as error:
            reason = registration.error or str(error)
            self._host.reporter.line(f"host {registration.replica}: {reason}")
            return lost or JobResult(registration.code if registration.error else 1, reason)

    async def _after_loss(self, registration: Registration) -> Registration:
        """Stop what runs; return the registration with another replica 0."""
        await self.stop(signal.SIGTERM)
        if self.pool is None:
            return registration
        return dataclasses.replace(registration, error=self.pool.remains, world=self.pool.world or registration.world)

    # -- requests of the controller ------------------------------------------------------------------------------------

    async def handle(self, request: host_messages.Request[Any]) -> Any:
        """Execute a request of the controller; ``HostRefused``, if it cannot be, ends the run, and not the hosts."""
        executing = asyncio.ensure_future(self._execute(request))
        executing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # Only a query may be cancelled: the zygote's next order would read the answer that is due to this one.
            return await (executing if isinstance(request, host_messages.Query) else asyncio.shield(executing))
        except (CommandError, LaunchError) as error:
            reason, code = str(error), 2 if isinstance(error, CommandError) else 1
        except Exception as error:
            traceback.print_exc()  # into the host's own log
            reason, code = f"{type(error).__name__}: {error}{processes.limit_hint(error)}", 1
        raise host_messages.HostRefused(self._host.name, reason, code)

    async def _execute(self, request: host_messages.Request[Any]) -> Any:
        pool = self.pool
        assert pool is not None
        match request:
            case host_messages.WatchRanks():
                await pool.watch()
                return await pool.exits()
            case host_messages.StopRanks():
                await pool.stop(request.signal, request.grace)
                if pool.remains:
                    raise LaunchError(pool.remains)
                return await pool.exits()
            case host_messages.TakeStacks():
                return shared_stacks(await pool.stacks(request.rank, request.save_as))
            case host_messages.ProfileRanks():
                return await pool.profile(request.ranks, request.seconds, request.idle)
            case host_messages.SampleRanks():
                return (await pool.samples()).to_text()
            case host_messages.RunWorkerLoop():
                return await self._worker_loops.run(request.token)
            case host_messages.GetWorkerLoop():
                return await self._worker_loops.get(request.token)
        raise ValueError(f"no request of this job: {type(request).__name__}")

    @functools.cached_property
    def _worker_loops(self) -> WorkerLoops:
        from torchx_monarch.host.worker_loops import WorkerLoops

        return WorkerLoops(self._host)
