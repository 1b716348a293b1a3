# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The registry of the roles' addresses, for backends that tell hosts only the address of the first role (AWS Batch).

Replica 0 of the first role serves the registry on the port of its rendezvous. Replica 0 of another role registers the
address on which it listens, and keeps that connection open; its entry lasts as long as the connection. The other hosts
of the role look the address up.

=========================  =======================================================================================
host to the registry       ``here`` (register: with role, host and port), ``where`` (look up: with role), both with
                           ``start``
registry to the host       ``noted``, ``there`` (with host and port), ``refused``
=========================  =======================================================================================

``start`` distinguishes this start of all roles from an earlier one, whose hosts may still exist.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from torchx_monarch.controller.host_events import StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import LaterError, Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import handshake
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, AddressError

_ASKED_FOR = 3.0
"""Seconds for which the registry delays its answer to a lookup. Then the host retries, and can report why it waits."""

_RETRY_PAUSE = 0.5
"""Seconds between the loss of the registry and the next try to reach it."""


def is_registered_address(rendezvous: str) -> bool:
    """Return whether only the registry knows the address: ``tls:@:PORT``, with no name after the ``@``."""
    return ":@:" in rendezvous


def start_of_app(environ: Mapping[str, str]) -> str:
    """Return the identifier of this start of all roles (``MONARCH_START``); empty if the backend provides none.

    A value ``@NAME`` stands for the value of the variable NAME.
    """
    start = environ.get("MONARCH_START", "")
    return environ.get(start[1:], "") if start.startswith("@") else start


def role_of(greeting: messages.Message, writer: asyncio.StreamWriter, start: str, no_client: str) -> str:
    """Return the role of a replica 0 that has greeted replica 0 of the first role.

    Args:
        greeting: the greeting.
        writer: the connection to that replica 0.
        start: identifier of this start of the app.
        no_client: the action that is forbidden to clients, for the message.

    Raises:
        RendezvousError: the peer is a client, or the greeting has no valid role.
        LaterError: the peer belongs to another start of the app.
    """
    if connections.is_client(writer):
        raise RendezvousError(f"a client may look at the job and stop it, and not {no_client}")
    role = greeting.get("role")
    if not isinstance(role, str):
        raise RendezvousError("the name of a role is a text")
    if greeting.get("start") != start:
        raise LaterError(f"it is of another start of the app ({start!r} here)")
    return role


class RoleRegistry:
    """The registry on replica 0 of the first role.

    Args:
        rendezvous: the rendezvous to which the other roles connect.
        start: identifier of this start of the app; empty if the backend provides none.
    """

    def __init__(self, rendezvous: Rendezvous, start: str) -> None:
        self._start = start
        self._places: dict[str, list[tuple[str, int]]] = {}  # addresses by role, newest last
        self._changed = asyncio.Event()
        rendezvous.clients.update(here=self._register, where=self._lookup)

    async def _register(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        role, host, port = self._role(greeting, writer), greeting.get("host"), greeting.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            raise RendezvousError("register with a host and a port")
        places = self._places.setdefault(role, [])
        places.append((host, port))
        self._changed.set()
        self._changed = asyncio.Event()
        try:
            await messages.send(writer, {"type": "noted"})
            await reader.read(1)  # returns at the end of the connection: the host sends nothing more
        finally:
            places.remove((host, port))
            if not places and self._places.get(role) is places:
                del self._places[role]

    async def _lookup(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        role = self._role(greeting, writer)

        async def told() -> tuple[str, int]:
            while role not in self._places:
                await self._changed.wait()
            return self._places[role][-1]

        try:
            host, port = await asyncio.wait_for(told(), _ASKED_FOR)
        except asyncio.TimeoutError:
            raise LaterError(f"replica 0 of role {role!r} has not registered its address yet") from None
        await messages.send(writer, {"type": "there", "host": host, "port": port})

    def _role(self, greeting: messages.Message, writer: asyncio.StreamWriter) -> str:
        return role_of(greeting, writer, self._start, "say or ask where its hosts are")


@dataclasses.dataclass(frozen=True)
class RegistryClient:
    """A host's client of the registry.

    Attributes:
        role: the host's role.
        address: address of the registry.
        start: identifier of this start of the app; empty if the backend provides none.
        is_main: whether the host belongs to the first role, whose replica 0 serves the registry.
    """

    role: str
    address: Address
    start: str
    is_main: bool

    @classmethod
    def of(cls, options: HostSpec, rendezvous: str, environ: Mapping[str, str]) -> RegistryClient | None:
        """Create the client from a host's options and environment; return None if there is no registry.

        Args:
            options: the command line.
            rendezvous: address on which replica 0 of the host's role listens, before any expansion.
            environ: the environment.

        Raises:
            NetworkError: the registry's address is in an environment variable that is not set.
            AddressError: the registry's address is not valid.
        """
        if not options.directory:
            return None
        is_main = not is_registered_address(rendezvous)
        where = local_addresses.expand_address(options.directory, environ, is_main and options.replica == 0)
        return cls(options.role, Address.parse(where, "--directory"), start_of_app(environ), is_main)

    def serve(self, rendezvous: Rendezvous) -> None:
        """Serve the registry, on replica 0 of the first role."""
        RoleRegistry(rendezvous, self.start)

    async def tell(self, rendezvous: Rendezvous, host_network: HostNetwork, reporter: Reporter, timeout: float) -> None:
        """Register this host's address, on replica 0 of another role, and keep the entry for as long as the host lives.

        If this fails for ``timeout`` seconds, the job ends: the other hosts of the role will not
        find this one.
        """
        where, why = host_network.rendezvous, ""

        def failed(reason: str) -> None:
            nonlocal why
            why = f" ({reason})"

        greeting = {"type": "here", "host": where.host, "port": where.port}
        aim = f"the first role's replica 0, through which the hosts of role {self.role!r} find theirs, was not reached"
        told = False
        while True:
            try:
                greeted = self._greet(greeting, "noted", self.role, host_network, timeout, aim, failed)
                if not told:
                    greeted = reporter.while_waiting(greeted, lambda: f"the first role's replica 0{why}")
                _, reader, writer = await greeted
            except RendezvousError as error:
                if not told:
                    verdict = JobResult(1, str(error), replica=0)
                    rendezvous.events.post(StopRequested(0, verdict))
                return
            told = True
            try:
                await reader.read(1)  # returns when the registry's host ends or the network fails
            finally:
                writer.close()
            await asyncio.sleep(_RETRY_PAUSE)

    async def find(
        self,
        role: str,
        host_network: HostNetwork,
        timeout: float,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> Address:
        """Look up the address on which replica 0 of a role listens, and retry until it has registered.

        Args:
            role: name of the role.
            host_network: connections of this host.
            timeout: seconds for all tries together.
            on_failure: called with the reason of each failed try.

        Raises:
            RendezvousError: the address was not available within ``timeout`` seconds.
        """
        aim = f"where replica 0 of role {role!r} listens was not to be learned from the first role's replica 0"
        answer, _, writer = await self._greet({"type": "where"}, "there", role, host_network, timeout, aim, on_failure)
        writer.close()
        told = f"{self.address.scheme}:{answer.get('host')}:{answer.get('port')}"
        try:
            return Address.parse(told, f"what replica 0 of role {role!r} has said")
        except AddressError as error:
            raise RendezvousError(str(error)) from None

    async def _greet(
        self,
        greeting: messages.Message,
        expected: str,
        role: str,
        host_network: HostNetwork,
        timeout: float,
        aim: str,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> tuple[messages.Message, asyncio.StreamReader, asyncio.StreamWriter]:
        return await handshake(
            self.address,
            {**greeting, "role": role, "start": self.start},
            expected,
            timeout,
            host_network.identity,
            host_network.options.peer_timeout,
            on_failure,
            aim,
            refused=str(self.address),
        )
