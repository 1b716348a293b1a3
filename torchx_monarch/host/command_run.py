# SPDX-License-Identifier: BSD-3-Clause
"""A command that runs no ranks, as the workload of a host: the one process of its replica."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from torchx_monarch.controller import host_messages
from torchx_monarch.controller.commands import CommandController
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_network import RendezvousError
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.host.command_process import StartedCommand, command_environ, start_command
from torchx_monarch.host.host import Host
from torchx_monarch.host.ranks.process_pool import ProcessPool
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.workload import Workload
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult, RankExit, shell_code
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import processes

_LAST_OUTPUT = 0.2
"""Seconds for the last output of a command that has ended."""


class CommandPool(ProcessPool):
    """The process of a command, or the failure to start it."""

    def __init__(self, host: Host, on_first_output: Callable[[], None]) -> None:
        super().__init__(host.options.replica, host.hostname, host.environ.get(processes.MARKER, ""), host.disk)
        self._host = host
        self._on_first_output = on_first_output
        self._environ = command_environ(host.environ)
        processes.raise_file_limit()
        self._failure: RankExit | None = None

    def launch(self, started: StartedCommand | None = None) -> tuple[int, ...]:
        """Start the command, or take on its process, once; return its process id if it could be started.

        Raises:
            LaunchError: it was stopped before.
        """
        if not self.ranks and self._failure is None:
            if self._stops:
                raise LaunchError("the command was stopped before it was started")
            self._take_on(started or start_command(self._host.options.command, self._environ))
        return tuple(rank.pid for rank in self.ranks)

    def _take_on(self, started: StartedCommand) -> None:
        host, replica, when = self._host, self._replica, started.started
        if started.process is None:
            error = {"message": started.failure}
            self._failure = RankExit(
                replica, -1, replica, host.hostname, 0, started.code, when, error=error, started=when
            )
            return
        command = Rank(replica, -1, self._on_first_output, process=started.process)
        command.started, command.error_file = when, self._environ.get("TORCHELASTIC_ERROR_FILE", "")
        command.stdout.assign(None, host.stdout, "")
        command.stderr.assign(None, host.stderr, "")
        command.release()
        self.ranks = [command]

    async def watch(self) -> None:
        for rank in self.ranks:
            await rank.wait()
            await rank.read_output(_LAST_OUTPUT)

    async def exits(self) -> list[RankExit]:
        return [self._failure] if self._failure is not None else await super().exits()


class CommandRun(Workload):
    """Run the command of a role, which has no ranks; ``started`` is its process if that runs already."""

    def __init__(self, host: Host, started: StartedCommand | None) -> None:
        super().__init__(host)
        self.pool: CommandPool = CommandPool(host, self._report_first_output)
        self._started = started
        host.reporter.shows_phases = False  # the output of a command is its own

    def parse(self) -> None:
        """Accept any command."""

    async def start(self) -> None:
        if self._host.options.starts == "alone":
            self.pool.launch(self._started)
            self.has_begun = True

    async def connect(self) -> None:
        """Listen for nothing: a command knows nothing of its host."""

    @property
    def sizes(self) -> NodeRange:
        options = self._host.options
        return NodeRange(options.min_replicas or options.replicas, options.replicas, options.host_timeout)

    def controller(self, rendezvous: Rendezvous) -> CommandController:
        hosts = JobHosts(rendezvous, self.sizes, self._host.reporter, self.handle)
        self._serve_clients(hosts)
        return CommandController(hosts)

    async def _execute(self, request: host_messages.Request[Any]) -> Any:
        if isinstance(request, host_messages.LaunchRanks):
            return host_messages.Launched(self.pool.launch())
        return await super()._execute(request)

    async def _join(self, registration: Registration, lost: JobResult | None) -> RendezvousClient | JobResult:
        """Register with replica 0, whether or not it is there before the command has ended.

        A host that meets no replica 0 within ``host_timeout`` seconds of the end of its command has the result of that
        command.
        """
        if not self.has_begun:
            return await super()._join(registration, lost)
        ends_alone = self._host.options.replacements > registration.restarts
        # A command that runs does not say that it waits.
        joining = asyncio.ensure_future(RendezvousClient.join(self._host.network, registration, math.inf))
        ending = asyncio.ensure_future(self._patience(ends_alone))
        try:
            await asyncio.wait([joining, ending], return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                return joining.result()
        except RendezvousError as error:
            self._host.reporter.line(f"host {registration.replica}: {error}; its command goes on")
            await self.pool.watch()
        finally:
            joining.cancel()
            ending.cancel()
        return await self._own_result()

    async def _after_loss(self, registration: Registration) -> Registration:
        return registration if self.has_begun else await super()._after_loss(registration)  # the command goes on

    async def _patience(self, ends_alone: bool) -> None:
        await self.pool.watch()
        if not (ends_alone and (await self._own_result()).code):
            await asyncio.sleep(self._host.options.host_timeout)

    async def _own_result(self) -> JobResult:
        (ended,) = await self.pool.exits()
        if not ended.code:
            return JobResult(0, "the command ended with code 0")
        return JobResult(shell_code(ended.code), ended.describe(), ended)
