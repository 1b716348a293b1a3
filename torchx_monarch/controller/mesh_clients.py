# SPDX-License-Identifier: BSD-3-Clause
"""Admit Monarch clients to the hosts of a role.

A client greets with ``attach`` and its names. When the hosts are together, replica 0 answers with ``attaching`` and,
once their worker loops listen, with ``attached``: their Monarch addresses and, under TLS, a certificate. Monarch's TLS
is mutual, and hosts dial the client back, so the hosts' authority signs this certificate, for the client's names. The
connection stays open for as long as the client lives. ``changed`` says that one of the worker loops has ended, with its
host or alone: the client is to attach again before it uses the hosts anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, TypeAlias

from torchx_monarch.controller.host_events import StopRequested
from torchx_monarch.controller.host_messages import GetWorkerLoop, HostCall, RunWorkerLoop, WorkerLoopEnded
from torchx_monarch.controller.host_network import Peer, RendezvousError
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult

if TYPE_CHECKING:
    from torchx_monarch.controller.run_queue import RunQueue

_MAX_NAMES = 1000
"""Most names in a client's certificate: those of its interfaces, of which a machine with containers has many, and its
own."""

_START_TIMEOUT = 60.0
"""Seconds for the worker loops of all hosts to start. The import of Monarch takes 0.3 s on a quiet machine."""

_SHUT_DOWN_WITHIN = 15.0
"""Seconds for the worker loops of a client that is gone to say that it has shut them down. Monarch's loop ends 5 s
after a client that ends as soon as ``HostMesh.shutdown()`` returns."""

_Loops: TypeAlias = HostCall[WorkerLoopEnded]

_HostAddress: TypeAlias = tuple[Registration, str]
"""A host, and the address of its worker loop."""


class MeshClients:
    """Serve the greeting ``attach`` (see ``HostNetwork.handlers``). Each client gets worker loops of its own.

    Hosts with a queue of runs do not count as idle while a client is attached.
    """

    def __init__(self, hosts: JobHosts, credentials: str, queue: RunQueue | None = None) -> None:
        self._hosts = hosts
        self._credentials = credentials
        self._queue = queue
        self._ends_hosts = queue is not None and queue.ends_with_mesh

    async def serve(self, peer: Peer) -> None:
        """Attach a client until its connection or the worker loops end."""
        names = peer.greeting.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > _MAX_NAMES:
            raise RendezvousError(f"names of a client are a list of at most {_MAX_NAMES} texts")
        leaf = self._leaf(names) if self._hosts.rendezvous.network.identity is not None else None
        await peer.while_connected(self._attach(leaf, peer))

    def _leaf(self, names: Sequence[str]) -> dict[str, str]:
        from torchx_monarch.transport.credentials import CredentialsError, HostCredentials

        try:
            credentials = HostCredentials.load(self._credentials)
            leaf = credentials.sign(names)
        except CredentialsError as error:
            raise RendezvousError(str(error)) from None
        return {**vars(leaf), "authority": credentials.authority}

    async def _attach(self, leaf: dict[str, str] | None, peer: Peer) -> None:
        hosts = self._hosts.members
        await hosts.until(lambda: hosts.are_together)
        await peer.send({"type": "attaching"})
        with self._queue.in_use() if self._queue is not None else contextlib.nullcontext():
            while True:
                formation, token = hosts.formation, secrets.token_hex(8)
                # The end of this request ends the worker loops, also where replica 0 is lost.
                with self._hosts.call(RunWorkerLoop(token)) as running:
                    if members := await self._ready(token, running):
                        await self._stay_attached(members, running, leaf, peer)
                        return
                await hosts.until(lambda old=formation: hosts.formation != old)  # type: ignore[misc]

    async def _stay_attached(
        self, members: Sequence[_HostAddress], running: _Loops, leaf: dict[str, str] | None, peer: Peer
    ) -> None:
        self._hosts.reporter.line(f"a Monarch client has attached to {len(members)} hosts")
        ended = asyncio.ensure_future(self._ended(running, peer))
        try:
            hosts = [{"replica": host.replica, "address": address, "name": host.name} for host, address in members]
            answer = {"type": "attached", "hosts": hosts, "leaf": leaf, "monarch": metadata.version("torchmonarch")}
            await peer.send(answer)
            await asyncio.shield(ended)
        finally:
            self._hosts.reporter.line("a Monarch client has detached")
            if self._ends_hosts:
                await asyncio.wait([ended], timeout=_SHUT_DOWN_WITHIN)
            ended.cancel()

    async def _ready(self, token: str, running: _Loops) -> Sequence[_HostAddress]:
        """Wait for the worker loops; return the hosts, or none if one of them is lost."""
        hosts = self._hosts.members.hosts
        ready, missing = await self._hosts.collect(GetWorkerLoop(token), _START_TIMEOUT)
        if not all(map(self._hosts.members.in_attempt, missing)):
            return []
        if missing:
            while not running.answers.empty():  # a loop that has failed before it was asked for says there why
                replica, answer = running.answers.get_nowait()
                missing.update({replica: answer.reason} if isinstance(answer, WorkerLoopEnded) else {})
            replica, reason = next(iter(sorted(missing.items())))
            raise RendezvousError(f"host {replica} has no worker loop for actors: {reason}")
        members = [(host, ready[host.replica]) for host in hosts]
        if reason := await self._hosts.rendezvous.network.why_unreachable(members):
            raise RendezvousError(reason)
        return members

    async def _ended(self, running: _Loops, peer: Peer) -> None:
        shut_down = False
        async for replica, answer in running:
            if isinstance(answer, WorkerLoopEnded) and answer.reason:
                self._hosts.reporter.line(f"the worker loop of host {replica} {answer.reason}")
                shut_down |= answer.shut_down
            await peer.send({"type": "changed"})
        if shut_down and self._ends_hosts:
            self._hosts.events.post(StopRequested(0, JobResult(0, "the mesh was shut down by its client")))
