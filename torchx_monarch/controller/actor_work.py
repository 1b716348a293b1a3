# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The work of hosts that wait for actors: admit Monarch clients and end the job when it is idle, or run a script.

A client greets with ``attach`` and its names. When all hosts have joined, replica 0 answers with their Monarch
addresses and, under TLS, with a certificate. Monarch's TLS is mutual, and hosts dial the client back, so the hosts'
authority signs this certificate, for the client's names. The connection stays open for as long as the client lives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from torchx_monarch.controller.host_events import HostEvent, Interrupted, StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult, RankExit, root_cause, shell_code
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import LaunchError
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import ConnectError
from torchx_monarch.transport.local_addresses import NetworkError

_REPORT_TIMEOUT = 1.0
"""Seconds to wait for the own report of a host that cannot be reached."""

_MOST_NAMES = 32
"""Most names in a client's certificate: those of its interfaces, and its own."""


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
        self._credentials = credentials
        self._shut_down = shut_down
        self._script = script
        self._ready = asyncio.Event()
        self._hosts: list[Registration] = []
        self._clients = 0
        self._changed = asyncio.Event()
        rendezvous.clients["attach"] = self._attach

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

    async def _attach(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._script is not None:
            raise RendezvousError("the client of this job is its own script, on replica 0")
        names = greeting.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > _MOST_NAMES:
            raise RendezvousError(f"names of a client are a list of at most {_MOST_NAMES} texts")
        leaf = self._leaf(names) if self._network.identity is not None else None
        gone = asyncio.ensure_future(reader.read())
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait([gone, ready], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                return
            hosts = [{"replica": host.replica, "address": host.address, "name": host.name} for host in self._hosts]
            self._count(1)
            try:
                await messages.send(writer, {"type": "attached", "hosts": hosts, "leaf": leaf})
                await asyncio.wait([gone])
            finally:
                self._count(-1)
        finally:
            gone.cancel()
            ready.cancel()

    def _leaf(self, names: Sequence[str]) -> dict[str, str]:
        from torchx_monarch.transport.credentials import CredentialsError, HostCredentials

        try:
            credentials = HostCredentials.load(self._credentials)
            leaf = credentials.sign(names)
        except CredentialsError as error:
            raise RendezvousError(str(error)) from None
        return {**dataclasses.asdict(leaf), "authority": credentials.authority}

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
