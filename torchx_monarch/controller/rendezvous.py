# SPDX-License-Identifier: BSD-3-Clause
"""The rendezvous, through which the hosts of a role register with replica 0 and learn the result of the job.

Replica 0 listens. Every other host connects, registers, sends heartbeats, which replica 0 answers, and waits for the
result. Each side counts the other as lost when the connection breaks, or stays silent for longer than the lease
(``transport.lease``).

=========================  =======================================================================================
host to replica 0          ``register`` (greeting, with the protocol's version), ``alive``, ``answer`` and
                           the reports (``host_messages``)
client to replica 0        ``state``, ``stop`` (greetings; the answer is ``state``), and the kinds in
                           ``Rendezvous.clients``
replica 0 to either        ``registered`` (with its name), ``alive``, ``refused`` (with the reason), ``state``,
                           ``request`` and ``cancel`` (``host_messages``), ``result``
=========================  =======================================================================================

The certificate distinguishes hosts from clients (``transport.connections.is_client``). Without certificates, on a
socket file of this user or on an insecure port, every peer may do everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable

from torchx_monarch.controller.elastic import HostRegistry
from torchx_monarch.controller.host_events import (
    HostEvents,
    HostLost,
    HostPreempted,
    StopRequested,
    signalled,
)
from torchx_monarch.controller.host_messages import HostRequests, SignalReceived, decode_report
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import ConnectError, Listener
from torchx_monarch.transport.lease import Leases

_GREETING_TIMEOUT = 10.0

_LATECOMERS = 1.0

_STOPPED = JobResult(128 + signal.SIGTERM, "the job was stopped by its client", stopped=True)


class RendezvousError(Exception):
    """A host or client is refused; the message says why."""


class _TakenError(RendezvousError):
    """Another host has registered with this replica id. It may be lost without replica 0 having noticed yet."""


class LaterError(RendezvousError):
    """The request cannot be granted yet. The peer retries until its time-out."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """Who has connected and sent a greeting: a client, a host or a rank."""

    greeting: messages.Message
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def is_client(self) -> bool:
        """Whether it has a client's certificate, and not a host's."""
        return connections.is_client(self.writer)

    async def receive(self, timeout: float | None = None) -> messages.Message | None:
        return await messages.receive(self.reader, timeout)

    async def send(self, message: messages.Message) -> bool:
        """Send a message; return False when the connection is closed or broken."""
        return await messages.send(self.writer, message)

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Await something, which is cancelled when this peer disconnects."""

        async def disconnection() -> None:
            with contextlib.suppress(OSError):
                while await self.reader.read(1 << 16):
                    pass

        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnection())
        try:
            await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


Serve = Callable[[Peer], Awaitable[None]]


class Rendezvous:
    """Replica 0's side of the rendezvous.

    Attributes:
        clients: handlers of client greetings, by kind. The handler owns the connection until it returns; its
            ``RendezvousError`` refuses the client.

    Args:
        fewest: minimum number of hosts that the job needs; None for all.
        say: called with a line for the job's log.
    """

    def __init__(
        self, network: HostNetwork, fewest: int | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.events = HostEvents()
        self.hosts = HostRegistry(network.options.replicas)
        self.clients: dict[str, Serve] = {"state": self._send_state, "stop": self._stop}
        self._network = network
        self._replicas = network.options.replicas
        self._fewest = self._replicas if fewest is None else fewest
        self._spares = network.options.spares
        self._say = say
        self._leases: Leases[int] = Leases(network.options.lease, self._lease_expired)
        self._silent: set[int] = set()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self.requests = HostRequests(self._writers)
        self._ending = False
        self._result: JobResult | None = None
        self._informed: set[int] = set()
        self._listener: Listener | None = None
        self._own_connections = set[asyncio.Task[None]]()  # the event loop holds tasks by weak references only

    async def start(self) -> None:
        """Start to listen; raise ``RendezvousError`` if the process cannot listen on the address."""
        try:
            network, timeout = self._network, self._network.options.peer_timeout
            self._listener = Listener(
                network.rendezvous, self._serve, network.identity, network.bind, timeout, self._say
            )
        except ConnectError as error:
            raise RendezvousError(str(error)) from None
        self._leases.start()

    async def connect(self, greeting: messages.Message) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect this host to itself, send the greeting with the protocol's version added, and return the streams."""
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=near, limit=messages.MAX_LINE)
        own_reader, own_writer = await asyncio.open_unix_connection(sock=far, limit=messages.MAX_LINE)

        async def serve() -> None:
            try:
                await self._serve(own_reader, own_writer)
            finally:
                own_writer.close()

        task = asyncio.ensure_future(serve())
        self._own_connections.add(task)
        task.add_done_callback(self._own_connections.discard)
        await messages.send(writer, {**greeting, "version": messages.VERSION})
        return reader, writer

    def register(self, host: Registration) -> None:
        """Register a host as present. The error of a host that cannot start is an event."""
        self.hosts.add(host)
        if host.error:
            reason = f"{host.name} cannot start: {host.error}"
            result = JobResult(host.code, reason, replica=host.replica)
            self.events.post(StopRequested(host.replica, result))

    async def dismiss(self, replica: int, result: JobResult) -> None:
        """Send one host the result with which it ends, while the job goes on without it."""
        if self.hosts.remove(replica):
            await messages.send(self._writers[replica], {"type": "result", "dismissed": True, **vars(result)})

    def end(self) -> None:
        """Put off hosts that the backend restarts, until it has restarted replica 0 as well.

        This is for backends that restart the hosts of a job one by one. A host that registered now would get the
        result of the job that is ending, and would use up one of its restarts for nothing.
        """
        self._ending = self.hosts.formed

    async def announce(self, result: JobResult, timeout: float) -> None:
        """Send every host the result; return when all have disconnected, or after ``timeout`` seconds.

        If no attempt has been formed, keep listening for a second and send the result to hosts that arrive late. They
        would otherwise look for a replica 0 for a long time.
        """
        self._result = result
        self._informed = set(self._writers)
        if result.code != 0:
            self.end()
        started = time.monotonic()
        message = {"type": "result", **vars(result)}
        if telling := [asyncio.ensure_future(messages.send(writer, message)) for writer in self._writers.values()]:
            await asyncio.wait(telling, timeout=timeout)  # in parallel: a host that does not read must not delay others
        open_for = 0.0 if self.hosts.formed or self._listener is None else _LATECOMERS
        while (self._writers or open_for) and time.monotonic() < started + timeout:
            await asyncio.sleep(0.005)
            if not self.hosts.expected or time.monotonic() > started + open_for:
                open_for = 0.0
        if self._listener is not None:
            self._listener.close()
            if not self._network.rendezvous.networked:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._network.rendezvous.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            greeting = await messages.receive(reader, _GREETING_TIMEOUT)
            kind = self._kind(greeting)
            if kind in self.clients:
                if self._listener is not None:
                    self._listener.mark_authenticated()
                await self.clients[kind](Peer(greeting or {}, reader, writer))
                return
            if connections.is_client(writer):
                raise RendezvousError("a client may look at the job and stop it, and not register as a host")
            host = self._admit(greeting or {})
        except (messages.ProtocolError, TimeoutError, RendezvousError) as error:
            # The reason may quote the peer's message, which can be long.
            refusal = {"type": "refused", "reason": str(error)[:1000], "taken": isinstance(error, _TakenError)}
            refusal["later"] = isinstance(error, LaterError)
            await messages.send(writer, refusal)
            return
        # Before the first await: another connection may register with the same replica id.
        self.requests.drop(host.replica)  # an earlier host of this id, which was dismissed
        self._writers[host.replica] = writer
        self._leases.renew(host.replica)
        self.register(host)
        if self._listener is not None:
            self._listener.mark_authenticated()
        own = self.hosts.registered.get(0)
        await messages.send(writer, {"type": "registered", "name": own.name if own else "replica 0"})
        if self.hosts.is_idle(host) and not host.error:
            self.hosts.on_idle_change(None)
        if self._result is not None:
            await messages.send(writer, {"type": "result", **vars(self._result)})
        try:
            lost = await self._follow(host, reader, writer)
        except messages.ProtocolError as error:
            lost = _lost(host, f"was lost: {error}")
        self._silent.discard(host.replica)
        if current := self._writers.get(host.replica) is writer:
            del self._writers[host.replica]
            self._leases.drop(host.replica)
        if self.hosts.registered.get(host.replica) is host:
            self.hosts.remove(host.replica)
            if not host.error and self._is_needless(host):
                self.hosts.on_idle_change(lost)
            elif not host.error:
                self.events.post(lost)
        if current:
            self.requests.drop(host.replica)  # after the event of the loss, which names the cause

    def _kind(self, greeting: messages.Message | None) -> str:
        if greeting is None:
            raise RendezvousError("the connection ended before a greeting")
        if greeting.get("version") != messages.VERSION:
            version = _brief(greeting.get("version"))
            raise RendezvousError(
                f"it speaks version {messages.VERSION} of the protocol, and this end version {version}: install one "
                "release of torchx-monarch on all hosts"
            )
        kind = greeting.get("type")
        if not isinstance(kind, str) or kind not in ("register", *self.clients):
            raise RendezvousError(f"the job is not a live allocation, and takes no request {_brief(kind)}")
        return kind

    def state(self) -> messages.Message:
        """Return the hosts' state for a client."""
        hosts = list(self.hosts.registered.values())
        return {"type": "state", "hosts": hosts, "missing": self.hosts.missing, "ended": self._result is not None}

    async def _send_state(self, peer: Peer) -> None:
        await peer.send(self.state())

    async def _stop(self, peer: Peer) -> None:
        self.events.post(StopRequested(0, _STOPPED))
        await peer.send(self.state())

    def _admit(self, greeting: messages.Message) -> Registration:
        try:
            host = decode(Registration, greeting.get("host"), "the registration")
        except DecodeError as error:
            raise RendezvousError(str(error)) from None
        if not 0 <= host.replica < self._replicas:
            raise RendezvousError(f"replica {host.replica!r} is not one of the {self._replicas} of this role")
        if host.replica in self.hosts.registered:
            raise _TakenError(
                f"replica {host.replica} has registered already: {self.hosts.registered[host.replica].name}"
            )
        if self._ending and host.attempt < 0:  # a host that has run attempts belongs to this job and needs its result
            raise LaterError("the hosts that this one was started to join are ending")
        if host.replica in self._informed:
            raise LaterError("its start before this one knows how the job has ended: it belongs to the next job")
        if host.error and self._fewest < self._replicas and self.hosts.formed:
            raise RendezvousError(host.error)  # the job goes on without it
        if host.error and host.replica and self._spares and self.hosts.add_refused(host.replica) <= self._spares:
            raise RendezvousError(host.error)
        return host

    async def _follow(self, host: Registration, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HostLost:
        while message := await messages.receive(reader):
            # A host that was dismissed may still send when another one has its place.
            is_current = self._writers.get(host.replica) is writer
            if is_current:
                self._leases.renew(host.replica)
            try:
                report = decode_report(message)
            except DecodeError as error:
                raise messages.ProtocolError(str(error)) from None
            if isinstance(report, SignalReceived):
                if not 0 < report.number < signal.NSIG:
                    raise messages.ProtocolError(f"{_brief(report.number)} is no number of a signal")
                event = signalled(host, report.number, report.announced)
                if self.hosts.registered.get(host.replica) is not host:
                    continue
                if isinstance(event, HostPreempted) and self._is_needless(host):
                    await self.dismiss(host.replica, event.result)
                    self.hosts.on_idle_change(event)
                else:
                    self.events.post(event)
            if message.get("type") == "answer" and is_current:
                self.requests.receive(host.replica, message)
            if message.get("type") == "alive" and is_current:
                await messages.send(writer, {"type": "alive"})
        if host.replica in self._silent:
            return _lost(host, f"does not answer: no message from it for {self._leases.seconds:g} s (lease)")
        if (pause := self._leases.own_pause) and 0 in self.hosts.registered:
            # This process paused, so its lease at the host expired. The host is sound and may register again.
            blamed = _lost(self.hosts.registered[0], f"did not run for {pause:.0f} s, and {host.name} has left it")
            return dataclasses.replace(blamed, replica=host.replica)
        return _lost(host, "was lost: its connection broke")

    def _is_needless(self, host: Registration) -> bool:
        """Return whether the present attempt goes on if a host, other than replica 0, is lost."""
        without = self.hosts.present - (self.hosts.registered.get(host.replica) is host)
        return self._spares > 0 and host.replica != 0 and self.hosts.is_idle(host) and without >= self._fewest

    def _lease_expired(self, replica: int) -> None:
        self._silent.add(replica)
        self._writers[replica].transport.abort()  # ends ``_follow`` of this host


def _lost(host: Registration, how: str) -> HostLost:
    result = JobResult(1, f"{host.name} {how}", consequence=True, replica=host.replica)
    return HostLost(host.replica, result)


def _brief(value: object) -> str:
    """Describe a value of a message for an error text. Nested values are named by type, because ``repr`` recurses."""
    return repr(value)[:20] if isinstance(value, (str, int, float)) else type(value).__name__
