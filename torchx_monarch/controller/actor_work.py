# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The work of hosts that wait for actors: admit Monarch clients and end the job when it is idle, or run a script.

The worker loops of these hosts run as long as the job, and all clients share them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Protocol

from torchx_monarch.controller.host_events import HostEvent, Interrupted, StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.mesh_clients import MeshClients, Say
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult, RankExit, root_cause, shell_code
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import LaunchError
from torchx_monarch.transport.connections import ConnectError
from torchx_monarch.transport.local_addresses import NetworkError

_REPORT_TIMEOUT = 1.0
"""Seconds to wait for the own report of a host that cannot be reached."""


class Script(Protocol):
    """The client script that replica 0 runs as a rank."""

    async def start(self, hosts: Sequence[Registration]) -> None:
        """Start the script when the hosts of all roles are known.

        Args:
            hosts: the hosts of this role, by replica.

        Raises:
            ConnectError: the hosts of another role have not all joined in time.
            LaunchError: the script cannot be started.
            NetworkError: the address of another role is not known.
            RendezvousError: the address of another role was not found in time.
        """

    async def wait(self) -> Sequence[RankExit]:
        """Wait until the script has ended and return its exit."""

    async def stop(self, number: int) -> None:
        """Send a signal, and SIGKILL after the grace period; return when the script has ended."""


class ActorWork:
    """Admit clients until the job ends (see ``Work``).

    Args:
        rendezvous: the rendezvous of hosts and clients.
        network: connections of this host.
        reporter: writes progress lines and events.
        idle_timeout: seconds without a client after which the job ends; 0 for no limit.
        credentials: value of ``env_names.CREDENTIALS``; empty without TLS.
        shut_down: set when a client has shut the mesh down.
        script: the only client, on this host; None if clients attach.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        network: HostNetwork,
        reporter: Reporter,
        idle_timeout: float,
        credentials: str,
        shut_down: asyncio.Event,
        script: Script | None,
    ) -> None:
        self._events = rendezvous.events
        self._network = network
        self._reporter = reporter
        self._idle_timeout = idle_timeout
        self._shut_down = shut_down
        self._script = script
        self._ready = asyncio.Event()
        self._hosts: list[Registration] = []
        self._clients = 0
        self._changed = asyncio.Event()
        rendezvous.clients["attach"] = MeshClients(network, credentials, self._attach).serve

    async def run(self, hosts: list[Registration]) -> JobResult:
        """Run the script to its end, or admit clients until one shuts the mesh down or all are gone (see ``Work``)."""
        self._hosts = hosts
        if wrong := await self._events.interrupt(self._network.unreachable(hosts)):
            failure = StopRequested(0, JobResult(1, next(iter(wrong.values()))))
            raise Interrupted(await self._events.report_within(_REPORT_TIMEOUT, failure))
        if self._script is not None:
            return await self._run_script(self._script, hosts)
        self._ready.set()
        self._reporter.phase("ready", "ready for actors")
        return await self._events.interrupt(self._admit())

    async def stop(self, event: HostEvent, left: bool) -> bool:
        """Stop the script, if there is one (see ``Work``)."""
        if self._script is not None:
            await self._script.stop(event.signal)
        return False

    def hosts_changed(self, joined: bool) -> None:
        """Do nothing: every change of the hosts ends the job."""

    async def close(self, result: JobResult) -> None:
        """Do nothing: clients notice the end of their connections."""

    async def _run_script(self, script: Script, hosts: list[Registration]) -> JobResult:
        try:
            await self._events.interrupt(script.start(hosts))
        except (LaunchError, NetworkError, ConnectError, RendezvousError) as error:
            return JobResult(1, f"host 0: {error}")
        self._reporter.phase("ranks", "script started")
        cause = root_cause(await self._events.interrupt(script.wait()))
        if cause is None:
            return JobResult(0, "the script has ended")
        return JobResult(shell_code(cause.code), cause.describe(), cause)

    async def _admit(self) -> JobResult:
        """Wait until the job ends without a host event; return its result."""
        waits = {
            asyncio.ensure_future(self._shut_down.wait()): "the mesh was shut down by its client",
            asyncio.ensure_future(self._idle()): f"no client for {self._idle_timeout:g} s (--idle-timeout)",
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return JobResult(0, waits[done.pop()])
        finally:
            for each in waits:
                each.cancel()

    # -- clients -------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _attach(self, _say: Say) -> AsyncIterator[tuple[Sequence[Registration], Awaitable[None]]]:
        """Wait until all hosts have joined, and count a client (see ``MeshClients``)."""
        if self._script is not None:
            raise RendezvousError("the client of this job is its own script, on replica 0")
        await self._ready.wait()
        self._count(1)
        try:
            yield self._hosts, asyncio.get_running_loop().create_future()
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._clients += change
        self._changed.set()
        self._changed = asyncio.Event()
        if self._clients == (change > 0):
            self._reporter.line("a client has attached" if change > 0 else "no client is attached any more")

    async def _idle(self) -> None:
        """Return when no client has been attached for ``idle_timeout`` seconds."""
        since = time.monotonic()
        while True:
            changed = asyncio.ensure_future(self._changed.wait())
            left = since + self._idle_timeout - time.monotonic()
            unlimited = self._clients > 0 or self._idle_timeout == 0
            try:
                await asyncio.wait([changed], timeout=None if unlimited else max(0.0, left))
            finally:
                changed.cancel()
            if self._clients == 0:
                if changed.done() and not changed.cancelled():
                    since = time.monotonic()
                elif time.monotonic() >= since + self._idle_timeout and self._idle_timeout:
                    return
