# SPDX-License-Identifier: BSD-3-Clause
"""The network connections of one host, which it opens or serves, and their protection.

A host that listens has one server for all that hosts, ranks and clients ask of it: each connection begins with a
greeting, whose type names its handler.

The scheme of the rendezvous address decides. With ``unix`` all hosts are on one machine, and nothing listens on a
network. With ``tls`` all connections use mutual TLS, with a certificate that this host signs for itself. With
``insecure-tcp`` none is protected.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Awaitable, Callable, Iterable

from torchx_monarch.model.codec import DecodeError
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.address import REPLICA0_NAME, as_ipv6
from torchx_monarch.transport.connections import Address, ConnectError, Identity, Listener

_CHECKS_AT_A_TIME = 64

_GREETING_TIMEOUT = 10.0

_FOR_HOSTS = frozenset({"register", "resume", "register-role", "breakpoint", "code", "checkpoint"})
"""The greetings of hosts and ranks. A client may do everything else."""


class RendezvousError(Exception):
    """A host or client is refused; the message says why."""


class TakenError(RendezvousError):
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


@dataclasses.dataclass(frozen=True)
class OfRank:
    """The global rank that a greeting concerns alone; None for all."""

    rank: int | None = None


Serve = Callable[[Peer], Awaitable[None]]

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclasses.dataclass
class HostNetwork:
    """The network connections of this host.

    Attributes:
        rendezvous: address on which replica 0 listens.
        advertised: name or IP address by which other hosts dial this one; ``127.0.0.1`` on one machine.
        bind: local IP address on which ports are opened; empty for all.
        identity: this host's certificate; None without TLS.
        folder: that of socket files.
        handlers: serve connections, by the types of their greetings. The handler owns the connection until it returns;
            its ``RendezvousError``, or the ``DecodeError`` of a greeting, refuses the peer.
    """

    rendezvous: Address
    options: HostSpec = HostSpec()
    advertised: str = "127.0.0.1"
    bind: str = ""
    identity: Identity | None = None
    folder: str = ""
    handlers: dict[str, Serve] = dataclasses.field(default_factory=dict, init=False)
    _listener: Listener | None = dataclasses.field(default=None, init=False)
    _address: Address | None = dataclasses.field(default=None, init=False)
    # The event loop holds tasks by weak references only.
    _own_connections: set[asyncio.Task[None]] = dataclasses.field(default_factory=set, init=False)

    @classmethod
    def setup(
        cls, rendezvous: Address, advertised: str, options: HostSpec, credentials: str, folder: str
    ) -> HostNetwork:
        """Create the certificate, in a folder of mode 0700; ``credentials`` are those of ``env_names.CREDENTIALS``.

        Raises:
            CredentialsError: under TLS, the credentials are missing or invalid.
            ValueError: ``--bind`` names no address of this host.
        """
        if not rendezvous.networked:
            return cls(rendezvous, options, advertised, bind="127.0.0.1", folder=folder)
        identity = None
        if rendezvous.scheme == "tls":
            from torchx_monarch.transport.credentials import CredentialsError, HostCredentials

            if not credentials:
                raise CredentialsError(
                    f"the hosts are to meet at {rendezvous}, and {CREDENTIALS} is not set: without the job's "
                    "credentials a host can neither prove itself nor know the others"
                )
            # All names by which others may dial this host: schedulers give out names, or addresses of any interface.
            names = {advertised, rendezvous.host, os.uname().nodename, *local_addresses.interfaces().values()}
            names |= {REPLICA0_NAME} if options.replica == 0 else set()
            names |= set(filter(None, map(as_ipv6, names)))  # a client that attaches again, see ``attachment``
            identity = Identity.from_credentials(HostCredentials.load(credentials), names, folder)
        bind = local_addresses.address_of(options.bind)
        return cls(rendezvous, options, advertised, bind, identity, folder)

    async def greet(self, address: Address, greeting: messages.Message) -> Streams:
        """Connect to an address and send a greeting, to which the protocol's version is added.

        Raises:
            ConnectError: the connection or the TLS handshake failed; the message says why.
        """
        reader, writer = await connections.connect(address, self.identity, self.options.peer_timeout)
        await messages.send(writer, {**greeting, "version": messages.VERSION})
        return reader, writer

    async def why_unreachable(self, members: Iterable[tuple[Registration, str]]) -> str:
        """Return why a host's worker loop cannot be reached or, under TLS, does not prove the host's identity.

        Empty if all can. Monarch does not report a failed handshake: it times out after a minute, without a reason.
        """
        if not self.rendezvous.networked:
            return ""
        at_a_time = asyncio.Semaphore(_CHECKS_AT_A_TIME)

        async def check(host: Registration, url: str) -> str:
            where, _, port = url.partition("://")[2].rpartition(":")
            if not where or not port.isdecimal():
                return f"{host.name} says that it listens at {url!r}, which is no address and port"
            address = Address(self.rendezvous.scheme, where, int(port))
            async with at_a_time:
                try:
                    _, writer = await connections.connect(address, self.identity, self.options.peer_timeout)
                    writer.close()
                except ConnectError as error:
                    return f"{host.name} cannot be reached by replica 0: {error}"
            return ""

        return next(filter(None, await asyncio.gather(*(check(host, url) for host, url in members))), "")

    # -- the server ----------------------------------------------------------------------------------------------------

    def listen(self, at: Address | None = None, say: Callable[[str], None] | None = None) -> str:
        """Serve connections at an address, or at any; return the address at which this host does so already, or now.

        ``say`` is called with a line for the log. ``ConnectError`` or ``ValueError`` says why the host cannot listen.
        """
        if self._listener is None:
            bound, options = None, self.options
            if at is None and self.rendezvous.networked:
                bound = local_addresses.bind_port(options.bind, options.ports)
                at = Address(self.rendezvous.scheme, self.advertised, bound.getsockname()[1])
            at = at or Address("unix", path=os.path.join(self.folder, "host"))
            self._listener = Listener(at, self._serve, self.identity, self.bind, options.peer_timeout, say, bound)
            self._address = at
        return str(self._address)

    def close(self) -> None:
        """Serve no further connections."""
        if self._listener is not None and self._address is not None:
            self._listener.close()
            if not self._address.networked:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._address.path)

    async def connect(self, greeting: messages.Message) -> Streams:
        """Connect to replica 0 with a greeting (see ``greet``); replica 0 connects to itself, also where none can."""
        if self.options.replica:
            return await self.greet(self.rendezvous, greeting)
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = Peer(await messages.receive(reader, _GREETING_TIMEOUT) or {}, reader, writer)
            handler = self._handler(peer)
            if self._listener is not None:
                self._listener.mark_authenticated()
            await handler(peer)
        except (messages.ProtocolError, TimeoutError, RendezvousError, DecodeError) as error:
            # The reason may quote the peer's message, which can be long.
            refusal = {"type": "refused", "reason": str(error)[:1000], "taken": isinstance(error, TakenError)}
            refusal["later"] = isinstance(error, LaterError)
            await messages.send(writer, refusal)

    def _handler(self, peer: Peer) -> Serve:
        version, kind = peer.greeting.get("version"), peer.greeting.get("type")
        if version != messages.VERSION:
            raise RendezvousError(
                f"it speaks version {messages.VERSION} of the protocol, and this end version {brief(version)}: install "
                "one release of torchx-monarch on all hosts"
            )
        if not isinstance(kind, str) or kind not in self.handlers:
            advice = f"to see what its hosts do: torchx monarch status {self.options.app}"
            raise RendezvousError(f"{self.options.app} is not a live allocation, and takes no runs or actors; {advice}")
        if kind in _FOR_HOSTS and peer.is_client:
            raise RendezvousError(f"a client may look at the job and stop it, and not {kind} as a host")
        role = peer.greeting.get("role")
        if role and role != self.options.role and kind != "register-role":
            raise RendezvousError(f"these are the hosts of role {self.options.role!r}, not of {role!r:.100}")
        return self.handlers[kind]


def brief(value: object) -> str:
    """Describe a value of a message for an error text. Nested values are named by type, because ``repr`` recurses."""
    return repr(value)[:20] if isinstance(value, (str, int, float)) else type(value).__name__
