# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How the hosts of a role find replica 0, stay in touch with it and learn the verdict.

Replica 0 listens; every other host connects, registers, sends a sign of life every few seconds (its lease) and waits
for the verdict. Replica 0 counts a host as lost when its connection breaks or stays silent for longer than the lease; a
host counts replica 0 as lost when the connection breaks.

=========================  =======================================================================================
host to replica 0          ``register`` (greeting, with the protocol's version), ``alive``, ``agent_lost``, ``signal``
client to replica 0        ``look``, ``stop`` (greetings; the answer is ``state``)
replica 0 to either        ``registered``, ``alive``, ``refused`` (with the reason), ``state``, ``verdict``
=========================  =======================================================================================

Who is a host and who a client shows in the certificate (``transport.is_client``). Where there is none, on a socket
file of our own user or on an insecure port, everybody may do everything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import ssl
import time
from collections.abc import Callable
from typing import Any

from torchx_monarch.errors import Verdict, describe_code
from torchx_monarch.runtime import protocol, transport
from torchx_monarch.runtime.transport import PEER_TIMEOUT, Address, ConnectError, Identity

LEASE = 60.0
"""Seconds of silence after which the other end counts as lost. A broken connection is noticed at once, and one to a
machine that is gone within the transport's ``peer_timeout``; what the lease finds is a process that hangs."""

_ALIVE_EVERY = 5.0

_GREETING_TIMEOUT = 10.0

_RETRY_EVERY = 0.01
"""Seconds between two tries to reach replica 0 at first; each wait is a little longer than the one before."""

_RETRY_AT_MOST = 0.5

_STALE_FOR = 1.6
"""For how long even a final refusal is tried again, in units of the peer timeout: an earlier job's replica 0 may still
have the port, or the host in whose place this one comes may not have been missed yet."""

_LATECOMERS = 1.0


class RendezvousError(Exception):
    """A host cannot take part; the message says why."""


class _TakenError(RendezvousError):
    """Another host is there in its place, which may be gone without anybody having noticed yet."""


class _EndingError(RendezvousError):
    """The hosts that were here are ending, and the backend has started one of them again before the others."""


@dataclasses.dataclass(frozen=True)
class Registration:
    """What a host says of itself.

    Attributes:
        replica: its id within the role.
        address: of its Monarch worker; empty with ``error``.
        hostname: name of the machine.
        pid: of the host process.
        nproc: ranks it will run.
        error: why it cannot take part; empty when it can.
        code: exit code that goes with ``error``.
        attempt: the last attempt that it took part in, under another replica 0; -1 for none.
    """

    replica: int
    address: str
    hostname: str
    pid: int
    nproc: int
    error: str = ""
    code: int = 1
    attempt: int = -1

    @property
    def name(self) -> str:
        """For messages: ``host 1 (node7, pid 4711)``."""
        return f"host {self.replica} ({self.hostname}, pid {self.pid})"


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Something that ends an attempt and comes from a host, not from a rank.

    Attributes:
        replica: the host.
        verdict: what it means for the job.
        lost: whether the host can no longer be asked to stop its ranks.
        signal: what the ranks of the others are stopped with.
    """

    replica: int
    verdict: Verdict
    lost: bool = True
    signal: int = signal.SIGTERM


class Rendezvous:
    """Replica 0's end.

    Args:
        address: where to listen.
        replicas: how many hosts the role has.
        identity: ours, where the address is one of TLS.
        bind: local address to listen on; empty for all.
        peer_timeout: seconds of a machine's silence until its connection breaks.
        lease: seconds of a process's silence allowed.
    """

    def __init__(
        self,
        address: Address,
        replicas: int,
        identity: Identity | None = None,
        bind: str = "",
        peer_timeout: float = PEER_TIMEOUT,
        lease: float = LEASE,
    ) -> None:
        self.troubles: asyncio.Queue[Trouble] = asyncio.Queue()
        self._address = address
        self._identity = identity
        self._bind = bind
        self._peer_timeout = peer_timeout
        self._replicas = replicas
        self._lease = lease
        self._hosts: dict[int, Registration] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._were_complete = False
        self._ending = False
        self._verdict: Verdict | None = None
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            RendezvousError: it is not possible there.
        """
        try:
            self._server = await transport.listen(
                self._address, self._serve, self._identity, self._bind, self._peer_timeout
            )
        except ConnectError as error:
            raise RendezvousError(str(error)) from None

    def register(self, host: Registration) -> None:
        """Count a host as present. A host that cannot take part is trouble."""
        self._hosts[host.replica] = host
        if host.error:
            reason = f"{host.name} cannot start: {host.error}"
            self.troubles.put_nowait(Trouble(host.replica, Verdict(host.code, reason), lost=False))
        elif len(self._hosts) == self._replicas:
            self._were_complete = True
            self._complete.set()

    async def hosts(self) -> list[Registration]:
        """Wait until all are present; their registrations by replica id."""
        await self._complete.wait()
        return [self._hosts[replica] for replica in range(self._replicas)]

    def end(self) -> None:
        """Have hosts wait that the backend starts again, until this one is started again as well.

        For backends that do so one by one: a host that was let in would be told this start's verdict, and so spend one
        of its restarts for nothing.
        """
        self._ending = self._were_complete

    @property
    def missing(self) -> list[int]:
        """Replicas that have not registered."""
        return [replica for replica in range(self._replicas) if replica not in self._hosts]

    @property
    def present(self) -> int:
        """How many hosts have registered."""
        return len(self._hosts)

    async def announce(self, verdict: Verdict, timeout: float) -> None:
        """Tell every host how the job ended; returns when they have hung up, or after ``timeout`` seconds.

        When that was before all had come, those that come within a second are told as well: they would look for a
        replica 0 for a long time.
        """
        self._verdict = verdict
        if verdict.code != 0:
            self.end()
        for writer in list(self._writers.values()):
            await protocol.send(writer, {"type": "verdict", **verdict.to_json()})
        started = time.monotonic()
        open_for = 0.0 if self._were_complete or self._server is None else _LATECOMERS
        while (self._writers or open_for) and time.monotonic() < started + timeout:
            await asyncio.sleep(0.005)
            if not self.missing or time.monotonic() > started + open_for:
                open_for = 0.0
        if self._server is not None:
            self._server.close()
            if not self._address.networked and os.path.exists(self._address.path):
                os.unlink(self._address.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            greeting = await protocol.receive(reader, _GREETING_TIMEOUT)
            kind = self._kind(greeting)
            if kind in ("look", "stop"):
                if kind == "stop":
                    self.troubles.put_nowait(stopped_by_client())
                await protocol.send(writer, {"type": "state", **self._state()})
                writer.close()
                return
            if transport.is_client(writer):
                raise RendezvousError("a client may look at the job and stop it, and not register as a host")
            host = self._admit(greeting or {})
        except (protocol.ProtocolError, TimeoutError, RendezvousError) as error:
            refusal = {"type": "refused", "reason": str(error), "again": isinstance(error, _TakenError)}
            refusal["later"] = isinstance(error, _EndingError)
            await protocol.send(writer, refusal)
            writer.close()
            return
        self._writers[host.replica] = writer
        await protocol.send(writer, {"type": "registered"})
        self.register(host)
        if self._verdict is not None:
            await protocol.send(writer, {"type": "verdict", **self._verdict.to_json()})
        try:
            lost = await self._follow(host, reader)
        except (protocol.ProtocolError, TimeoutError) as error:
            lost = f"{host.name} was lost: {error}"
        del self._writers[host.replica]
        writer.close()
        if not host.error:
            # From now on its replacement may register.
            del self._hosts[host.replica]
            self._complete.clear()
            self.troubles.put_nowait(Trouble(host.replica, Verdict(1, lost)))

    def _kind(self, greeting: protocol.Message | None) -> str:
        if greeting is None:
            raise RendezvousError("the connection ended before a greeting")
        if greeting.get("version") != protocol.VERSION:
            version = str(greeting.get("version"))[:20]
            raise RendezvousError(
                f"it speaks version {protocol.VERSION} of the protocol, and this end version {version}: install one "
                "release of torchx-monarch on all hosts"
            )
        kind = greeting.get("type")
        if kind not in ("register", "look", "stop"):
            raise RendezvousError(f"a greeting is register, look or stop, not {str(kind)[:20]!r}")
        return str(kind)

    def _state(self) -> protocol.Message:
        hosts = [dataclasses.asdict(host) for host in self._hosts.values()]
        return {"hosts": hosts, "missing": self.missing, "over": self._verdict is not None}

    def _admit(self, greeting: protocol.Message) -> Registration:
        try:
            host = Registration(**greeting["host"])
        except (KeyError, TypeError) as error:
            raise RendezvousError(f"the registration is not complete: {error}") from None
        for field in dataclasses.fields(Registration):
            if type(getattr(host, field.name)).__name__ != field.type:
                raise RendezvousError(f"{field.name} of the registration is no {field.type}")
        if not 0 <= host.replica < self._replicas:
            raise RendezvousError(f"replica {host.replica!r} is not one of the {self._replicas} of this role")
        if host.replica in self._hosts:
            raise _TakenError(f"replica {host.replica} has registered already: {self._hosts[host.replica].name}")
        if self._ending and host.attempt < 0:  # one that has seen attempts is of this start, and wants the verdict
            raise _EndingError("the hosts that this one was started to join are ending")
        return host

    async def _follow(self, host: Registration, reader: asyncio.StreamReader) -> str:
        """Read what a host sends; returns why it counts as lost."""
        while message := await protocol.receive(reader, self._lease):
            kind = message.get("type")
            if kind == "agent_lost":
                return agent_lost(host).verdict.reason
            if kind == "signal":
                number = message.get("number")
                if not isinstance(number, int) or not 0 < number < signal.NSIG:
                    raise protocol.ProtocolError(f"{str(number)[:20]!r} is no number of a signal")
                self.troubles.put_nowait(signalled(host.replica, number))
            if kind == "alive":
                await protocol.send(self._writers[host.replica], {"type": "alive"})
        return f"{host.name} was lost: its connection broke"


def agent_lost(host: Registration) -> Trouble:
    """The trouble of a host whose agent has died."""
    return Trouble(host.replica, Verdict(1, f"the agent of {host.name} died"))


def signalled(replica: int, number: int) -> Trouble:
    """The trouble of a host that was told to stop."""
    what = describe_code(-number).partition("by ")[2]
    verdict = Verdict(128 + number, f"host {replica} was told to stop by {what}", stopped=True)
    return Trouble(replica, verdict, lost=False, signal=number)


def stopped_by_client() -> Trouble:
    """The trouble of a client that has asked for the end of the job."""
    return Trouble(0, Verdict(128 + signal.SIGTERM, "the job was told to stop by its client", stopped=True), lost=False)


class Membership:
    """The end of every other host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def join(
        cls,
        address: Address,
        host: Registration,
        timeout: float,
        identity: Identity | None = None,
        peer_timeout: float = PEER_TIMEOUT,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> Membership:
        """Connect to replica 0 and register; tries again until it listens.

        Args:
            address: where it listens.
            host: what it is told.
            timeout: seconds.
            identity: ours, where the address is one of TLS.
            peer_timeout: seconds of its machine's silence until the connection breaks.
            on_failure: called with the reason why a try has failed.

        Raises:
            RendezvousError: refused, or nobody listened within ``timeout`` seconds.
        """
        greeting = {"type": "register", "version": protocol.VERSION, "host": dataclasses.asdict(host)}
        started = time.monotonic()
        pause, why = _RETRY_EVERY, ""
        while time.monotonic() < started + timeout:
            try:
                reader, writer = await transport.connect(address, identity, peer_timeout)
                await protocol.send(writer, greeting)
                try:
                    answer = await protocol.receive(reader, LEASE)
                except protocol.ProtocolError as error:
                    raise ConnectError(f"{address}: what listens there is another program: {error}") from None
                except TimeoutError as error:
                    raise ConnectError(f"{address}: {error}") from None
                if answer is not None and answer.get("type") == "registered":
                    return cls(reader, writer)
                writer.close()
                if answer is not None:
                    refusal = f"replica 0 refused this host: {answer.get('reason')}"
                    if answer.get("later"):
                        raise ConnectError(refusal)
                    if answer.get("again"):
                        raise ConnectError(refusal, final=True)
                    raise RendezvousError(refusal)
                broken = reader.exception()
                if isinstance(broken, ssl.SSLError):  # its word on our certificate comes after the handshake
                    raise transport.explain(broken, address)
                # One that is about to end, and whose socket was still open: there may be another.
                raise ConnectError(f"{address}: it hung up")
            except ConnectError as error:
                why = str(error)
                on_failure(why)
                if error.final and time.monotonic() > started + _STALE_FOR * peer_timeout:
                    raise RendezvousError(why) from None
            await asyncio.sleep(pause)
            pause = min(pause * 1.2, _RETRY_AT_MOST)
        raise RendezvousError(f"replica 0 was not reached in {timeout:g} s: {why}")

    async def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to replica 0."""
        await protocol.send(self._writer, {"type": kind, **fields})

    async def verdict(self) -> Verdict | None:
        """Wait for the verdict, sending signs of life; None when replica 0 is lost."""
        alive = asyncio.ensure_future(self._stay_alive())
        try:
            while message := await protocol.receive(self._reader, LEASE):
                if message.get("type") == "verdict":
                    return Verdict.from_json(message)
            return None
        except (protocol.ProtocolError, TimeoutError):
            return None
        finally:
            alive.cancel()

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_EVERY)
            await self.tell("alive")
