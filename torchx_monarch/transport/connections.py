# SPDX-License-Identifier: BSD-3-Clause
"""Connections between hosts: listening on an address, connecting to it, and the certificates of both ends.

======================  ============================================================================================
``unix:PATH``           hosts of one machine: a socket file of mode 0600 in a folder of mode 0700
``tls:HOST:PORT``       TLS 1.3; both ends show a certificate of the job's authority
``insecure-tcp:H:P``    no protection: anyone who reaches the port can run code; for networks that are closed otherwise
======================  ============================================================================================

A cut network link produces no error. The kernel therefore probes silent connections and breaks one after
``peer_timeout`` seconds without an answer, however busy the processes at both ends are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torchx_monarch.transport import messages
from torchx_monarch.transport.address import CONNECT_TIMEOUT, Address, AddressError, ConnectError, explain
from torchx_monarch.transport.listener import Listener, Serve
from torchx_monarch.transport.streams import open_streams

if TYPE_CHECKING:
    from torchx_monarch.transport.credentials import HostCredentials

__all__ = ["Address", "AddressError", "ConnectError", "Identity", "connect", "explain", "greet", "is_client", "listen"]

FIRST_HANDSHAKE_TIMEOUT = 3.0
"""Seconds for the TLS handshake of the first try. A waiting host can then soon report that there is no answer."""

LATER_HANDSHAKE_TIMEOUT = 30.0
"""Seconds for the TLS handshake of later tries. When thousands of hosts connect together, each waits for the hosts
before it, and each handshake takes about 1.5 ms of replica 0's CPU time."""

_BACKLOG = 4096
"""All hosts of a large job connect within a second. The kernel uses the smaller of this and net.core.somaxconn."""


@dataclasses.dataclass(frozen=True, repr=False)
class Identity:
    """The certificate and key of this host, and the authorities that it trusts.

    Attributes:
        certificate: path of the file with the host's certificate.
        key: path of the file with the host's key; mode 0600.
        authority: path of the file with the certificate of the hosts' authority.
        client_authority: certificate of the client's authority, as PEM; empty when no client is accepted.
    """

    certificate: str
    key: str
    authority: str
    client_authority: str = ""

    @classmethod
    def of(cls, credentials: HostCredentials, names: Iterable[str], folder: str) -> Identity:
        """Sign a certificate for this host and write it, its key and the authority to files.

        Args:
            folder: folder for the files; mode 0700.
        """
        leaf = credentials.sign(names)
        paths = []
        for content in (leaf.certificate, leaf.key, credentials.authority):
            descriptor, path = tempfile.mkstemp(prefix="tls", dir=folder)
            with os.fdopen(descriptor, "w") as file:
                file.write(content)
            paths.append(path)
        return cls(paths[0], paths[1], paths[2], credentials.client_authority)

    @property
    def files(self) -> tuple[str, str, str]:
        """Return the paths of certificate, key and authority."""
        return self.certificate, self.key, self.authority

    def context(self, server: bool) -> ssl.SSLContext:
        """Return an SSL context for TLS 1.3 that requires a certificate from the peer."""
        return _context(self, server)


@functools.lru_cache(maxsize=4)  # replica 0 connects to every host; a context takes as long to create as a handshake
def _context(identity: Identity, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(identity.certificate, identity.key)
    context.load_verify_locations(identity.authority)
    if server:
        context.num_tickets = 0  # tickets resume sessions, and no host or client connects twice
        if identity.client_authority:
            context.load_verify_locations(cadata=identity.client_authority)
    return context


def is_client(writer: asyncio.StreamWriter) -> bool:
    """Return whether the peer has shown a client's certificate rather than a host's."""
    certificate = writer.get_extra_info("peercert")
    if not certificate:
        return False
    from torchx_monarch.transport.credentials import CLIENT_AUTHORITY

    return (("commonName", CLIENT_AUTHORITY),) in certificate["issuer"]


async def listen(
    address: Address,
    serve: Serve,
    identity: Identity | None,
    bind: str,
    peer_timeout: float,
    say: Callable[[str], None] | None = None,
) -> Listener:
    """Listen on an address and serve every connection.

    Args:
        serve: called with each connection after its handshake. It calls ``Listener.mark_authenticated`` once the peer
            has identified itself; until then the listener may close the connection.
        identity: this host's certificate; None without TLS.
        bind: local IP address to listen on; empty for all.
        peer_timeout: seconds without an answer from the peer's machine after which the kernel breaks a connection.
        say: as for ``Listener``.

    Raises:
        ConnectError: the process cannot listen on the address.
    """
    try:
        if not address.networked:
            return Listener(_socket_file(address.path), serve, None, messages.MAX_LINE, say)
        context = identity.context(server=True) if identity else None
        listening = _port(bind, address.port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConnectError(f"cannot listen for the other hosts at {address.path or address}: {reason}") from None

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watch_peer(writer, peer_timeout)
        await serve(reader, writer)

    return Listener(listening, accepted, context, messages.MAX_LINE, say)


def _socket_file(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by an earlier replica 0 that this one replaces
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _port(bind: str, port: int) -> socket.socket:
    if bind:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        return socket.create_server((bind, port), family=family, backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


async def connect(
    address: Address, identity: Identity | None, peer_timeout: float, handshake_timeout: float = LATER_HANDSHAKE_TIMEOUT
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the address of replica 0.

    Args:
        identity: this host's certificate; None without TLS.
        peer_timeout: seconds without an answer from the peer's machine after which the kernel breaks the connection.
        handshake_timeout: seconds for the TLS handshake.

    Raises:
        ConnectError: the connection or the handshake failed; the message says why.
    """
    limit = messages.MAX_LINE
    try:
        if not address.networked:
            return await asyncio.open_unix_connection(address.path, limit=limit)
        connection = await asyncio.wait_for(_dial(address), CONNECT_TIMEOUT)
        context = identity.context(server=False) if identity else None
        reader, writer = await open_streams(connection, limit, context, address.host, handshake_timeout)
    except (OSError, asyncio.TimeoutError, ValueError, OverflowError) as error:
        raise explain(error, address) from None
    watch_peer(writer, peer_timeout)
    return reader, writer


async def greet(
    address: Address,
    greeting: messages.Message,
    identity: Identity | None,
    peer_timeout: float,
    handshake_timeout: float = LATER_HANDSHAKE_TIMEOUT,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the address of replica 0 and send a greeting, to which the protocol's version is added.

    The other arguments and the exceptions are those of ``connect``.
    """
    reader, writer = await connect(address, identity, peer_timeout, handshake_timeout)
    await messages.send(writer, {**greeting, "version": messages.VERSION})
    return reader, writer


async def _dial(address: Address) -> socket.socket:
    if not 0 < address.port < 65536:  # getaddrinfo would use the port modulo 65536
        raise OverflowError("a port is a number from 1 to 65535")
    loop = asyncio.get_running_loop()
    failure = OSError(f"{address.host} has no address")
    try:
        # At once for an IP address. A name is resolved in another thread.
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for family, kind, number, _, where in found:
        connection = socket.socket(family, kind, number)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, where)
            return connection
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:  # wait_for cancels this task on a time-out
            connection.close()
            raise
    raise failure


def watch_peer(writer: asyncio.StreamWriter, seconds: float) -> None:
    """Have the kernel break the connection when the peer's machine has not answered for ``seconds``."""
    connection = writer.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Keepalive: idle for 2/5 of the time, then three probes of 1/5 each. USER_TIMEOUT covers unacknowledged data.
    interval = max(1, round(seconds / 5))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
