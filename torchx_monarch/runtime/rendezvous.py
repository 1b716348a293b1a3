# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How the hosts of a role find replica 0, stay in touch with it and learn the verdict.

Replica 0 listens; every other host connects, registers, sends a sign of life every few seconds (its lease) and waits
for the verdict. Replica 0 counts a host as lost when its connection breaks or stays silent for longer than the lease; a
host counts replica 0 as lost when the connection breaks.

=========================  =======================================================================================
host to replica 0          ``register`` (greeting, with the protocol's version), ``alive``, ``agent_lost``, ``signal``
replica 0 to host          ``registered``, ``refused`` (with the reason), ``verdict``
=========================  =======================================================================================

The address is ``unix:PATH``, a socket file of mode 0600 in a folder of mode 0700.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from torchx_monarch.errors import Verdict, describe_code
from torchx_monarch.runtime import protocol

LEASE = 60.0
"""Seconds of silence after which the other end counts as lost. A broken connection is noticed at once."""

_ALIVE_EVERY = 5.0

_RETRY_EVERY = 0.01

_LATECOMERS = 1.0


class RendezvousError(Exception):
    """A host cannot take part; the message says why."""


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
        joined: whether it is a host that has come while an attempt runs, and wants to take part.
    """

    replica: int
    verdict: Verdict
    lost: bool = True
    signal: int = signal.SIGTERM
    joined: bool = False


def socket_path(address: str) -> str:
    """The path in ``unix:PATH``.

    Raises:
        RendezvousError: another kind of address.
    """
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path:
        raise RendezvousError(f"MONARCH_RENDEZVOUS={address!r} is not of the form unix:PATH")
    return path


class Rendezvous:
    """Replica 0's end.

    Args:
        address: where to listen.
        replicas: how many hosts the role has.
        fewest: how many of them the job needs at least; None for all.
        lease: seconds of silence allowed.
    """

    def __init__(self, address: str, replicas: int, fewest: int | None = None, lease: float = LEASE) -> None:
        self.troubles: asyncio.Queue[Trouble] = asyncio.Queue()
        self._path = socket_path(address)
        self._replicas = replicas
        self._elastic = fewest is not None and fewest < replicas
        self._lease = lease
        self._hosts: dict[int, Registration] = {}
        self._members: dict[int, Registration] = {}
        self._seen: set[int] = set()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._formed = False
        self._verdict: Verdict | None = None
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            RendezvousError: the socket file cannot be made.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # of a replica 0 that was replaced
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=protocol.MAX_LINE)
            os.chmod(self._path, 0o600)
        except OSError as error:
            raise RendezvousError(f"cannot listen for the other hosts at {self._path}: {error.strerror}") from None

    def register(self, host: Registration) -> None:
        """Count a host as present. A host that cannot take part is trouble."""
        self._hosts[host.replica] = host
        self._seen.add(host.replica)
        if host.error:
            reason = f"{host.name} cannot start: {host.error}"
            self.troubles.put_nowait(Trouble(host.replica, Verdict(host.code, reason), lost=False))
        self._note_change()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds that depends on which hosts are present."""
        while not condition():
            await self._changed.wait()

    def form(self) -> list[Registration]:
        """Make those that are present the members of the next attempt; their registrations by replica id.

        What came of hosts that are gone, or have joined, is settled by that.
        """
        self._formed = True
        self._members = {each: host for each, host in sorted(self._hosts.items()) if not host.error}
        for _ in range(self.troubles.qsize()):
            trouble = self.troubles.get_nowait()
            gone = trouble.lost or (trouble.verdict.stopped and trouble.replica not in self._members)
            if trouble.replica == 0 or not (gone or trouble.joined):
                self.troubles.put_nowait(trouble)
        return list(self._members.values())

    @property
    def newcomers(self) -> list[Registration]:
        """Hosts that are present and no members yet."""
        return [host for replica, host in sorted(self._hosts.items()) if self._members.get(replica) is not host]

    async def dismiss(self, replica: int, verdict: Verdict) -> None:
        """Let one host go, which is to end as the verdict says while the job goes on."""
        if self._hosts.pop(replica, None) is not None:
            self._note_change()
            await protocol.send(self._writers[replica], {"type": "verdict", **verdict.to_json()})

    @property
    def missing(self) -> list[int]:
        """Replicas that have not registered."""
        return [replica for replica in range(self._replicas) if replica not in self._hosts]

    @property
    def present(self) -> int:
        """How many hosts have registered and can take part."""
        return sum(not host.error for host in self._hosts.values())

    @property
    def expected(self) -> bool:
        """Whether there are replicas that have never registered: they may still come."""
        return len(self._seen) < self._replicas

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def announce(self, verdict: Verdict, timeout: float) -> None:
        """Tell every host how the job ended; returns when they have hung up, or after ``timeout`` seconds.

        When that was before all had come, those that come within a second are told as well: they would look for a
        replica 0 for a long time.
        """
        self._verdict = verdict
        for writer in list(self._writers.values()):
            await protocol.send(writer, {"type": "verdict", **verdict.to_json()})
        started = time.monotonic()
        open_for = 0.0 if self._formed or self._server is None else _LATECOMERS
        while (self._writers or open_for) and time.monotonic() < started + timeout:
            await asyncio.sleep(0.005)
            if not self.missing or time.monotonic() > started + open_for:
                open_for = 0.0
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            greeting = await protocol.receive(reader, self._lease)
            host = self._admit(greeting)
        except (protocol.ProtocolError, TimeoutError, RendezvousError) as error:
            await protocol.send(writer, {"type": "refused", "reason": str(error)})
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
        if self._writers.get(host.replica) is writer:
            del self._writers[host.replica]
        writer.close()
        if not host.error and self._hosts.get(host.replica) is host:
            # From now on its replacement may register.
            del self._hosts[host.replica]
            self._note_change()
            self.troubles.put_nowait(Trouble(host.replica, Verdict(1, lost)))

    def _admit(self, greeting: protocol.Message | None) -> Registration:
        if greeting is None:
            raise RendezvousError("the connection ended before a greeting")
        if greeting.get("type") != "register" or greeting.get("version") != protocol.VERSION:
            raise RendezvousError(f"a greeting of version {protocol.VERSION} is expected")
        try:
            host = Registration(**greeting["host"])
        except (KeyError, TypeError) as error:
            raise RendezvousError(f"the registration is not complete: {error}") from None
        if not isinstance(host.replica, int) or not 0 <= host.replica < self._replicas:
            raise RendezvousError(f"replica {host.replica!r} is not one of the {self._replicas} of this role")
        if host.replica in self._hosts:
            raise RendezvousError(f"replica {host.replica} has registered already: {self._hosts[host.replica].name}")
        if host.error and self._elastic and self._formed:
            raise RendezvousError(host.error)  # the job goes on without it
        return host

    async def _follow(self, host: Registration, reader: asyncio.StreamReader) -> str:
        """Read what a host sends; returns why it counts as lost."""
        while message := await protocol.receive(reader, self._lease):
            kind = message.get("type")
            if kind == "agent_lost":
                return agent_lost(host).verdict.reason
            if kind == "signal" and self._hosts.get(host.replica) is host:
                self.troubles.put_nowait(signalled(host.replica, int(message["number"])))
        return f"{host.name} was lost: its connection broke"


def agent_lost(host: Registration) -> Trouble:
    """The trouble of a host whose agent has died."""
    return Trouble(host.replica, Verdict(1, f"the agent of {host.name} died"))


def joined(host: Registration) -> Trouble:
    """What a host brings about that has come while an attempt runs."""
    return Trouble(host.replica, Verdict(0, f"{host.name} has joined"), lost=False, joined=True)


def signalled(replica: int, number: int) -> Trouble:
    """The trouble of a host that was told to stop."""
    what = describe_code(-number).partition("by ")[2]
    verdict = Verdict(128 + number, f"host {replica} was told to stop by {what}", stopped=True)
    return Trouble(replica, verdict, lost=False, signal=number)


class Membership:
    """The end of every other host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def join(cls, address: str, host: Registration, timeout: float) -> Membership:
        """Connect to replica 0 and register; tries again until it listens.

        Raises:
            RendezvousError: refused, or nobody listened within ``timeout`` seconds.
        """
        path = socket_path(address)
        greeting = {"type": "register", "version": protocol.VERSION, "host": dataclasses.asdict(host)}
        until = time.monotonic() + timeout
        why = ""
        while time.monotonic() < until:
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=protocol.MAX_LINE)
            except OSError as error:
                why = error.strerror or str(error)
                await asyncio.sleep(_RETRY_EVERY)
                continue
            await protocol.send(writer, greeting)
            answer = await protocol.receive(reader, LEASE)
            if answer is not None and answer.get("type") == "registered":
                return cls(reader, writer)
            writer.close()
            if answer is not None:
                raise RendezvousError(f"replica 0 refused this host: {answer.get('reason')}")
            # One that is about to end, and whose socket was still open: there may be another.
            why = "it hung up"
            await asyncio.sleep(_RETRY_EVERY)
        raise RendezvousError(f"replica 0 was not reached in {timeout:g} s at {path}: {why}")

    async def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to replica 0."""
        await protocol.send(self._writer, {"type": kind, **fields})

    async def verdict(self) -> Verdict | None:
        """Wait for the verdict, sending signs of life; None when replica 0 is lost."""
        alive = asyncio.ensure_future(self._stay_alive())
        try:
            while message := await protocol.receive(self._reader):
                if message.get("type") == "verdict":
                    return Verdict.from_json(message)
            return None
        except protocol.ProtocolError:
            return None
        finally:
            alive.cancel()

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_EVERY)
            await self.tell("alive")
