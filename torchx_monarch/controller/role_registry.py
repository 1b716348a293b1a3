# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where replica 0 of each role is, on backends that tell hosts where the first role's is and nothing else (AWS Batch).

Replica 0 of the first role keeps the directory, at the port where its own role's hosts come. Replica 0 of another role
says where it listens, and holds that connection: what it has said counts for as long. The others of its role ask.

=========================  =======================================================================================
host to the directory      ``here`` (with role, host and port) and ``where`` (with role), both with ``start``
directory to the host      ``noted``, ``there`` (with host and port), ``refused``
=========================  =======================================================================================

``start`` tells this start of all roles from an earlier one, whose hosts may not have gone yet.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.host_options import HostOptions
from torchx_monarch.controller.rendezvous import HostEvent, LaterError, Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import handshake
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, AddressError

_ASKED_FOR = 3.0
"""Seconds that a host waits for its answer; then it asks again, and can say meanwhile what it waits for."""

_AGAIN = 0.5
"""Seconds between the loss of the directory and the next try to reach it."""


def is_told(rendezvous: str) -> bool:
    """Whether nobody but the directory can say where this is: ``tls:@:PORT``, with no name after the ``@``."""
    return ":@:" in rendezvous


def start_of_app(environ: Mapping[str, str]) -> str:
    """What tells this start of all roles from an earlier one (``MONARCH_START``); empty where the backend does not say.

    ``@NAME`` is the value of that variable.
    """
    start = environ.get("MONARCH_START", "")
    return environ.get(start[1:], "") if start.startswith("@") else start


def role_of(greeting: messages.Message, writer: asyncio.StreamWriter, start: str, no_client: str) -> str:
    """Of which role a replica 0 is that greets the first role's.

    Args:
        greeting: what it has said.
        writer: the connection to it.
        start: which start of the app this is.
        no_client: what a client may not do here, for the message.

    Raises:
        RendezvousError: it is a user's client, or has said something else.
        LaterError: it is of another start.
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
    """Replica 0 of the first role: is told, and tells.

    Args:
        rendezvous: where the others come.
        start: which start of the app this is; empty where the backend does not say.
    """

    def __init__(self, rendezvous: Rendezvous, start: str) -> None:
        self._start = start
        self._places: dict[str, list[tuple[str, int]]] = {}  # of each role the newest is the last
        self._changed = asyncio.Event()
        rendezvous.clients.update(here=self._note, where=self._tell)

    async def _note(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        role, host, port = self._role(greeting, writer), greeting.get("host"), greeting.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            raise RendezvousError("whoever is here says where, as host and port")
        places = self._places.setdefault(role, [])
        places.append((host, port))
        self._changed.set()
        self._changed = asyncio.Event()
        try:
            await messages.send(writer, {"type": "noted"})
            await reader.read(1)  # nothing more is to come but the end
        finally:
            places.remove((host, port))
            if not places and self._places.get(role) is places:
                del self._places[role]

    async def _tell(
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
            raise LaterError(f"replica 0 of role {role!r} has not said yet where it listens") from None
        await messages.send(writer, {"type": "there", "host": host, "port": port})

    def _role(self, greeting: messages.Message, writer: asyncio.StreamWriter) -> str:
        return role_of(greeting, writer, self._start, "say or ask where its hosts are")


@dataclasses.dataclass(frozen=True)
class RegistryClient:
    """A host's way to the directory.

    Attributes:
        role: the host's own.
        address: of the directory.
        start: which start of the app this is; empty where the backend does not say.
        is_main: whether the host is of the first role, whose replica 0 keeps the directory.
    """

    role: str
    address: Address
    start: str
    is_main: bool

    @classmethod
    def of(cls, options: HostOptions, rendezvous: str, environ: Mapping[str, str]) -> RegistryClient | None:
        """By a host's options and environment; None where no directory is kept.

        Args:
            options: the command line.
            rendezvous: where its own role's replica 0 listens, as it was given.
            environ: the environment.

        Raises:
            NetworkError: the directory's address is in a variable that says nothing.
            AddressError: it is none.
        """
        if not options.directory:
            return None
        is_main = not is_told(rendezvous)
        where = local_addresses.expanded(options.directory, environ, is_main and options.replica == 0)
        return cls(options.role, Address.parse(where, "--directory"), start_of_app(environ), is_main)

    def serve(self, rendezvous: Rendezvous) -> None:
        """Keep the directory, on replica 0 of the first role."""
        RoleRegistry(rendezvous, self.start)

    async def tell(self, rendezvous: Rendezvous, host_network: HostNetwork, reporter: Reporter, timeout: float) -> None:
        """Tell the directory for as long as this host lives where it listens, on replica 0 of another role.

        When that comes to nothing within ``timeout`` seconds the other hosts will not find this one: that is trouble.
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
                    rendezvous.host_events.put_nowait(HostEvent(0, verdict, lost=False))
                return
            told = True
            try:
                await reader.read(1)  # it ends with its host, or when the network fails
            finally:
                writer.close()
            await asyncio.sleep(_AGAIN)

    async def find(
        self,
        role: str,
        host_network: HostNetwork,
        timeout: float,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> Address:
        """Where replica 0 of a role listens, when it has said so.

        Args:
            role: its name.
            host_network: of this host.
            timeout: seconds.
            on_failure: called with the reason why it is not known yet.

        Raises:
            RendezvousError: it is not known after ``timeout`` seconds.
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
