# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The controller of a role whose hosts wait for actors: it admits Monarch clients and ends the job when it is idle.

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

from torchx_monarch.controller.elastic import HostGatherer, NodeRange, TooFewHosts
from torchx_monarch.controller.host_events import HostEvent
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult, RankExit, root_cause, shell_code
from torchx_monarch.model.registration import Registration
from torchx_monarch.transport import messages
from torchx_monarch.transport.local_addresses import NetworkError

_MOST_NAMES = 32
"""Most names in a client's certificate: those of its interfaces, and its own."""


class Script(Protocol):
    """The process of a client script, which replica 0 runs as a rank (``host.rank_pool.RankPool``)."""

    async def watch(self) -> None:
        """Wait until the process has ended."""

    async def stop(self, number: int, grace: float) -> None:
        """Send signal ``number``, and SIGKILL ``grace`` seconds later; return when the process has ended."""

    def exits(self) -> list[RankExit]:
        """Return the exit of the process; empty while it runs."""


class ActorController:
    """Run a role whose hosts wait for actors, until the job ends.

    Args:
        rendezvous: the rendezvous of hosts and clients.
        host_network: connections of this host.
        reporter: writes progress lines and events.
        sizes: number of hosts of the role.
        idle_timeout: seconds without a client after which the job ends; 0 for no limit.
        credentials: value of ``credentials.VARIABLE``; empty without TLS.
        shut_down: set when a client has shut the mesh down.
        script: whether the only client is a script on this host; other clients are then refused.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        host_network: HostNetwork,
        reporter: Reporter,
        sizes: NodeRange,
        idle_timeout: float,
        credentials: str,
        shut_down: asyncio.Event,
        script: bool,
    ) -> None:
        self._rendezvous = rendezvous
        self._host_network = host_network
        self._reporter = reporter
        self._gatherer = HostGatherer(sizes, rendezvous, reporter, host_network.unreachable)
        self._idle_timeout = idle_timeout
        self._credentials = credentials
        self._shut_down = shut_down
        self._script = script
        self._ready = asyncio.Event()
        self._hosts: list[Registration] = []
        self._clients = 0
        self._changed = asyncio.Event()
        rendezvous.clients["attach"] = self._attach

    async def gather(self) -> list[Registration] | JobResult:
        """Wait for all hosts and check that they can be reached; return the hosts, or the verdict of a failure."""

        async def gathered() -> list[Registration]:
            hosts: list[Registration] = []
            while not hosts:
                await self._gatherer.enough(0.0)
                hosts = self._gatherer.form()
            for wrong in (await self._gatherer.unreachable(hosts)).values():
                raise NetworkError(wrong)
            return hosts

        gatherer, host_event = asyncio.ensure_future(gathered()), asyncio.ensure_future(self._host_event())
        try:
            await asyncio.wait([gatherer, host_event], return_when=asyncio.FIRST_COMPLETED)
            if not gatherer.done():
                return host_event.result().result
            self._hosts = gatherer.result()
        except (TooFewHosts, NetworkError) as error:
            return JobResult(1, str(error))
        finally:
            gatherer.cancel()
            host_event.cancel()
        return self._hosts

    async def wait(self) -> JobResult:
        """Admit clients until the job ends; return the verdict."""
        self._ready.set()
        self._reporter.phase("ready", "ready for actors")
        waits = {
            asyncio.ensure_future(self._host_event()): "trouble",
            asyncio.ensure_future(self._shut_down.wait()): "the mesh was shut down by its client",
            asyncio.ensure_future(self._idle()): f"no client for {self._idle_timeout:g} s (--idle-timeout)",
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = done.pop()
            host_event = first.result()
            return host_event.result if isinstance(host_event, HostEvent) else JobResult(0, waits[first])
        finally:
            for each in waits:
                each.cancel()

    async def run(self, pool: Script, grace: float) -> JobResult:
        """Wait for the end of the client script on this host, or stop the script at a host event; return the verdict.

        Args:
            pool: the process of the script.
            grace: seconds from the signal to SIGKILL.
        """
        watch, host_event = asyncio.ensure_future(pool.watch()), asyncio.ensure_future(self._host_event())
        try:
            await asyncio.wait([watch, host_event], return_when=asyncio.FIRST_COMPLETED)
            if not watch.done():
                await pool.stop(host_event.result().signal, grace)
                return host_event.result().result
        finally:
            watch.cancel()
            host_event.cancel()
        cause = root_cause(pool.exits())
        return (
            JobResult(shell_code(cause.code), cause.describe(), cause)
            if cause
            else JobResult(0, "the script has ended")
        )

    async def _host_event(self) -> HostEvent:
        host_event = await self._rendezvous.events.next()
        self._reporter.note(host_event.KIND, host_event.result.reason, replica=host_event.replica)
        return host_event

    # -- clients -------------------------------------------------------------------------------------------------------

    async def _attach(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._script:
            raise RendezvousError("the client of this job is its own script, on replica 0")
        names = greeting.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > _MOST_NAMES:
            raise RendezvousError(f"names of a client are a list of at most {_MOST_NAMES} texts")
        leaf = self._leaf(names) if self._host_network.identity is not None else None
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
