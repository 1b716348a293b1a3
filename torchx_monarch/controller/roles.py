# SPDX-License-Identifier: BSD-3-Clause
"""The coordination of an app's roles: where their replicas 0 listen, and that they end and restart together.

Replica 0 of the first role is the server. Replica 0 of every other role registers with it, for one or both reasons:

- The backend tells hosts only the address of the first role (AWS Batch, wrapped schedulers). The registration has that
  of this role, which other hosts look up while it is connected.
- The backend lets each role end by itself, and all are to restart together (``RetryPolicy.APPLICATION`` with retries;
  always on these two). The first role ends last, and puts off hosts that are restarted before then, so no role starts
  while ranks of an earlier start are running. On these two it also waits for the success of the others, but sidecars.

=========================  =======================================================================================
any host to the server     ``lookup-role`` (greeting; with role and start)
replica 0 to the server    ``register-role`` (greeting, see ``_Greeting``), ``ready`` (from then on its loss counts
                           as a failure), ``ended`` (with the result of the role)
server to the others       ``found`` (with host and port), ``registered``, ``refused``, ``restart`` (with the result
                           of the role that has failed), ``done``
=========================  =======================================================================================

``start`` distinguishes this start of all roles from an earlier one, whose hosts may still exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torchx_monarch.controller.host_events import Changes, HostJoined, HostLost, Interrupted, StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import LaterError, Peer, Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import PutOffError, handshake
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import local_addresses, messages
from torchx_monarch.transport.connections import Address, AddressError, ConnectError

_LOOKUP_DELAY = 3.0
"""Seconds for which a lookup waits for an address before the host is told to ask again, and can report why it waits."""

_TRY_FOR = 5.0
"""Seconds for which a role that needs no answer tries to reach the server, again and again."""

_REGISTER_AGAIN = 0.5
"""Seconds between the loss of the server, or its refusal, and the next try to reach it."""

_REGISTERED_WITHIN = 5.0
"""Seconds for which the first role waits for the others before it starts. Roles that have not registered yet would not
learn of its failure if it failed immediately."""

_REPORTED_WITHIN = 1.0
"""Seconds for which a failed other role waits for its connection to the server, over which it reports the failure."""

_READY_TIMEOUT = 10.0

_RESTART_NOTE = "the application begins again, while retries are left"


def is_registered_address(rendezvous: str) -> bool:
    """Return whether only the server knows the address: ``tls:@:PORT``, with no name after the ``@``."""
    return ":@:" in rendezvous


def _endpoint(address: str) -> str:
    """Return the part of an address by which roles differ: the port, or the name of the socket file."""
    return address.rpartition(":")[2].rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class _Greeting:
    """A host's greeting of the server, which registers or looks up a role.

    ``host`` is where the role's replica 0 is dialled, empty if all hosts know it. A ``joint`` role ends and restarts
    with the others.
    """

    role: str
    start: str
    host: str = ""
    port: int = 0
    joint: bool = False


class RoleCoordinator:
    """Replica 0's part in the coordination. This class is for apps whose roles need none, and does nothing."""

    async def begin(self, timeout: float) -> None:
        """Wait until the roles can start together, for ``timeout`` seconds or until a host event.

        The first role waits briefly for the others, and these wait for the first.
        """

    async def await_others(self, result: JobResult, timeout: float) -> JobResult:
        """Return the result of this role. The first role, when it has succeeded, waits for the roles that it awaits.

        These have ``timeout`` seconds to register. If one fails, or this host is asked to stop, the result is that.
        """
        return result

    async def end(self, result: JobResult, timeout: float) -> None:
        """Send the result to the other roles. After a failure the first waits up to ``timeout`` s for their ends."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """The other roles of an app, as a host of one of them sees them.

    Attributes:
        start: identifier of this start of the app (MONARCH_START); empty if the backend provides none.
        server: address of the server; None if the roles need no coordination.
        is_first: whether the host belongs to the first role, whose replica 0 is the server.
        looks_up: whether the hosts of this role look up the address of their replica 0.
    """

    options: HostSpec
    start: str
    server: Address | None
    is_first: bool
    looks_up: bool

    @classmethod
    def from_spec(cls, options: HostSpec, rendezvous: str, environ: Mapping[str, str]) -> Roles:
        """Derive the roles from a host's options and environment; ``rendezvous`` is not expanded.

        Raises:
            ValueError: the server's address is in an environment variable that is not set.
            AddressError: the server's address is not valid.
        """
        text = options.role_registry or options.application
        option = "--role-registry" if options.role_registry else "--application"
        is_first = _endpoint(text) == _endpoint(rendezvous)
        server = None
        # Only replica 0 needs a server that is no registry, and the expansion fails where its address is unknown.
        if options.role_registry or (options.application and options.replica == 0):
            expanded = local_addresses.expand_address(text, environ, is_first and options.replica == 0)
            server = Address.parse(expanded, option)
        looks_up = bool(options.role_registry) and is_registered_address(rendezvous)
        start = environ.get("MONARCH_START", "")
        if start.startswith("@"):  # the name of the variable that holds it
            start = environ.get(start[1:], "")
        return cls(options, start, server, is_first, looks_up)

    def coordinator(self, rendezvous: Rendezvous, network: HostNetwork, reporter: Reporter) -> RoleCoordinator:
        """Return the part of this replica 0 in the coordination: the server's on the first role, else a client's."""
        if self.server is None or not (self.options.application or self.is_first or self.looks_up):
            return RoleCoordinator()
        if self.is_first:
            return RoleServer(self, rendezvous, reporter)
        return RoleClient(self, rendezvous, network, reporter)

    async def find(
        self,
        role: str,
        network: HostNetwork,
        timeout: float,
        on_failure: Callable[[ConnectError], None] = lambda error: None,
    ) -> Address:
        """Look up the address on which replica 0 of a role listens, and retry until it has registered."""
        assert self.server is not None
        greeting = {"type": "lookup-role", **dataclasses.asdict(_Greeting(role, self.start))}
        answer, _, writer = await handshake(network, self.server, greeting, "found", timeout, on_failure)
        writer.close()
        found = f"{self.server.scheme}:{answer.get('host')}:{answer.get('port')}"
        try:
            return Address.parse(found, f"what replica 0 of role {role!r} has said")
        except AddressError as error:
            raise RendezvousError(str(error)) from None


class RoleServer(RoleCoordinator):
    """The server, on replica 0 of the first role."""

    def __init__(self, roles: Roles, rendezvous: Rendezvous, reporter: Reporter) -> None:
        self._roles = roles
        self._events = rendezvous.events
        self._reporter = reporter
        self._joint = roles.options.peer_roles if roles.options.application else 0
        self._awaited = set(roles.options.await_role)
        self._addresses: dict[str, tuple[str, int]] = {}  # by role; the newest counts
        self._links: dict[str, Peer] = {}  # connections of the roles that end with this one
        self._arrived: set[str] = set()
        self._succeeded: set[str] = set()
        self._adopted = ""
        self._changes = Changes()
        self._ending = False
        rendezvous.clients.update({"register-role": self._register, "lookup-role": self._lookup})

    async def begin(self, timeout: float) -> None:
        all_ready = self._changes.until(lambda: len(self._arrived) >= self._joint, min(timeout, _REGISTERED_WITHIN))
        with contextlib.suppress(Interrupted):
            await self._reporter.while_waiting(self._events.interrupt(all_ready), lambda: "the other roles")

    async def await_others(self, result: JobResult, timeout: float) -> JobResult:
        if result.code:
            return result
        waiting = self._others_succeeded(result, timeout)
        # This role has succeeded: its hosts that leave, or arrive too late, change nothing.
        unless_stopped = self._events.interrupt(waiting, lambda event: not isinstance(event, (HostLost, HostJoined)))
        try:
            return await self._reporter.while_waiting(
                unless_stopped, lambda: f"the end of role {', '.join(sorted(self._awaited - self._succeeded))}"
            )
        except Interrupted as interruption:
            return interruption.event.result

    async def _others_succeeded(self, result: JobResult, timeout: float) -> JobResult:
        if not await self._changes.until(lambda: self._awaited <= self._arrived, timeout):
            missing = ", ".join(sorted(self._awaited - self._arrived))
            return JobResult(1, f"replica 0 of role {missing} has not arrived in {timeout:g} s (--host-timeout)")
        await self._changes.until(lambda: self._awaited <= self._succeeded)
        return result

    async def end(self, result: JobResult, timeout: float) -> None:
        self._ending = True
        message: messages.Message = {"type": "done"}
        if result.code:
            message = {"type": "restart", **_explained(result, self._roles.options.role, self._adopted)}
        for peer in list(self._links.values()):
            await peer.send(message)
        await self._changes.until(lambda: not self._links, timeout if result.code else 0.0)

    def _greeting(self, peer: Peer) -> _Greeting:
        if peer.is_client:
            raise RendezvousError("a client may look at the job and stop it, and not take part in its coordination")
        try:
            greeting = decode(_Greeting, peer.greeting)
        except DecodeError as error:
            raise RendezvousError(str(error)) from None
        if greeting.start != self._roles.start:
            raise LaterError(f"it is of another start of the app ({self._roles.start!r} here)")
        return greeting

    async def _lookup(self, peer: Peer) -> None:
        role = self._greeting(peer).role
        await self._changes.until(lambda: role in self._addresses, _LOOKUP_DELAY)
        if role not in self._addresses:
            raise LaterError(f"replica 0 of role {role!r} has not registered its address yet")
        host, port = self._addresses[role]
        await peer.send({"type": "found", "host": host, "port": port})

    async def _register(self, peer: Peer) -> None:
        other = self._greeting(peer)
        if other.joint and other.role in self._links and not self._ending:
            self._fail(f"replica 0 of role {other.role!r} was started again")
        if other.joint and self._ending:
            raise LaterError(f"the hosts of role {self._roles.options.role!r} are ending, to begin again")
        address = (other.host, other.port)
        if other.host:
            self._addresses[other.role] = address
        if other.joint:
            self._links[other.role] = peer
        self._changes.notify()
        try:
            await peer.send({"type": "registered"})
            succeeded = other.joint and await self._follow(other.role, peer)
            # Returns at the end of the connection: replica 0 is the last host of its role to end.
            await peer.reader.read(1)
            if succeeded:
                self._succeeded.add(other.role)
        finally:
            if self._addresses.get(other.role) is address:
                del self._addresses[other.role]
            if other.joint:
                del self._links[other.role]
            self._changes.notify()

    async def _follow(self, role: str, peer: Peer) -> bool:
        try:
            if await peer.receive(_READY_TIMEOUT) is None:
                return False  # the other role ended before it was ready
            self._arrived.add(role)
            self._changes.notify()
            message = await peer.receive()
            ended = None if message is None else decode(JobResult, message)
        except TimeoutError:
            self._fail(f"replica 0 of role {role!r} was not ready in {_READY_TIMEOUT:g} s")
            return False
        except (messages.ProtocolError, DecodeError) as error:
            self._fail(f"replica 0 of role {role!r} sent an invalid message: {error}")
            return False
        if ended is None:
            self._fail(f"replica 0 of role {role!r} was lost")
        elif ended.code:
            self._adopt(ended)
        return ended is not None and not ended.code

    def _fail(self, reason: str) -> None:
        self._adopt(JobResult(1, f"{reason}; {_RESTART_NOTE}"))

    def _adopt(self, ended: JobResult) -> None:
        if not self._ending:
            self._ending = True  # from here on, a replica 0 that connects belongs to the next start
            self._adopted = ended.reason
            self._events.post(_failure(ended))


class RoleClient(RoleCoordinator):
    """The client of the server, on replica 0 of another role."""

    def __init__(self, roles: Roles, rendezvous: Rendezvous, network: HostNetwork, reporter: Reporter) -> None:
        self._roles = roles
        self._events = rendezvous.events
        self._network = network
        self._reporter = reporter
        self._joint = bool(roles.options.application)
        self._why = "no answer yet"
        self._may_begin = asyncio.Event()
        self._registered = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._ended = False
        self._connection = asyncio.ensure_future(self._stay_registered())

    async def begin(self, timeout: float) -> None:
        if self._joint:
            waiting = self._events.interrupt(asyncio.wait_for(self._may_begin.wait(), timeout))
            with contextlib.suppress(asyncio.TimeoutError, Interrupted):
                await self._reporter.while_waiting(waiting, self._what)

    async def end(self, result: JobResult, timeout: float) -> None:
        self._ended = True
        within = _REPORTED_WITHIN if result.code else 0.0
        if not result.code and self._roles.options.role in self._roles.options.await_role:
            within = self._roles.options.host_timeout  # the first role waits for this report
        if self._joint and within:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._registered.wait(), within)
        if self._joint and self._writer is not None:
            message = {"type": "ended", **_explained(result, self._roles.options.role)}
            await messages.send(self._writer, message)

    def _what(self) -> str:
        return f"the first role's replica 0 ({self._why})"

    def _not_registered(self, error: Exception) -> None:
        self._why = str(error)
        if not isinstance(error, PutOffError):  # nothing listens there, so no earlier start is left
            self._may_begin.set()

    async def _stay_registered(self) -> None:
        """Register, and again after a loss of the server.

        A role whose hosts look up its address fails if it cannot register in time; any other starts without the server.
        """
        found_by, where = self._roles.looks_up, self._network.rendezvous
        registered = _Greeting(self._roles.options.role, self._roles.start, joint=self._joint)
        if found_by:
            registered = dataclasses.replace(registered, host=where.host, port=where.port)
        greeting = {"type": "register-role", **dataclasses.asdict(registered)}
        while True:
            try:
                registering = self._register(greeting)
                if found_by and not self._registered.is_set():
                    registering = self._reporter.while_waiting(registering, self._what)
                reader, self._writer = await registering
            except RendezvousError as error:
                if found_by:
                    if not self._registered.is_set():
                        self._events.post(StopRequested(0, JobResult(1, str(error), replica=0)))
                    return
                await asyncio.sleep(_REGISTER_AGAIN)
                continue
            self._may_begin.set()
            self._registered.set()
            try:
                if self._joint:
                    return await self._follow(reader, self._writer)
                await reader.read(1)  # returns when the server ends or the network fails
            finally:
                self._writer.close()
                self._writer = None
            await asyncio.sleep(_REGISTER_AGAIN)

    async def _register(self, greeting: messages.Message) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        options, server = self._roles.options, self._roles.server
        assert server is not None
        timeout = options.host_timeout if self._roles.looks_up else _TRY_FOR
        registering = handshake(self._network, server, greeting, "registered", timeout, self._not_registered)
        _, reader, writer = await registering
        return reader, writer

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await messages.send(writer, {"type": "ready"})
        ended = JobResult(1, f"replica 0 of the first role was lost; {_RESTART_NOTE}")
        with contextlib.suppress(messages.ProtocolError, DecodeError):
            message = await messages.receive(reader)
            if message and message.get("type") == "done":
                return
            ended = decode(JobResult, message or {})
        if not self._ended:
            self._events.post(_failure(ended))
        await asyncio.Event().wait()  # keep the connection open: it shows that hosts of this role still exist


def _explained(result: JobResult, role: str, adopted: str = "") -> dict[str, Any]:
    """Return the result of a role for a message; ``adopted`` is the reason that came from another role, if one did."""
    replica = result.cause.replica if result.cause else max(0, result.replica)
    reason = result.reason[: messages.MAX_ERROR]
    if result.reason != adopted:
        reason = f"{role}/{replica} failed: {reason}; {_RESTART_NOTE}"
    return {"code": result.code, "reason": reason, "stopped": result.stopped}


def _failure(ended: JobResult) -> StopRequested:
    return StopRequested(0, dataclasses.replace(ended, code=ended.code or 1, cause=None, consequence=True, replica=0))
