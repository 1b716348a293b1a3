# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The connections between hosts: where replica 0 listens, who may connect, and in words why somebody cannot.

======================  ============================================================================================
``unix:PATH``           hosts of one machine: a socket file of mode 0600 in a folder of mode 0700
``tls:HOST:PORT``       TLS 1.3, both ends with a certificate of the job's own authority
``insecure-tcp:H:P``    no protection: whoever reaches the port can run code; for networks that are closed otherwise
======================  ============================================================================================

A cut link says nothing, so the kernel is asked to find out: it probes a silent connection and gives it up after
``peer_timeout`` seconds, however busy the processes at its ends are.
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
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchx_monarch.transport import messages
from torchx_monarch.transport.address import CONNECT_TIMEOUT, Address, AddressError, ConnectError, explain
from torchx_monarch.transport.listener import Listener, Serve

if TYPE_CHECKING:
    from torchx_monarch.transport.credentials import HostCredentials

__all__ = ["Address", "AddressError", "ConnectError", "Identity", "connect", "explain", "is_client", "listen"]

PEER_TIMEOUT = 5.0
"""Seconds after which a network connection whose other end does not answer counts as broken, unless told otherwise."""

IMPATIENCE = 3.0
"""Seconds for the handshake at a first try: a waiting host can then say that there is no answer."""

PATIENCE = 30.0
"""Seconds for the handshake once the connection is there: where thousands of hosts come at once, each waits for those
before it, about 1.5 ms of replica 0's processor for each."""

_BACKLOG = 4096
"""All hosts of a large job connect within a second. The kernel takes the lesser of this and net.core.somaxconn."""


@dataclasses.dataclass(frozen=True, repr=False)
class Identity:
    """Who this host is to the others, and whom it trusts.

    Attributes:
        certificate: file with its certificate.
        key: file with its key, mode 0600.
        authority: file with the certificate of the hosts' authority.
        client_authority: certificate of the client's authority, as PEM.
    """

    certificate: str
    key: str
    authority: str
    client_authority: str = ""

    @classmethod
    def of(cls, credentials: HostCredentials, names: Iterable[str], folder: str) -> Identity:
        """A certificate made for this host.

        Args:
            credentials: the job's.
            names: names and addresses by which this host is dialled.
            folder: for the files; of mode 0700.
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
        """Certificate, key, authority."""
        return self.certificate, self.key, self.authority

    def context(self, server: bool) -> ssl.SSLContext:
        """TLS 1.3 with a certificate required of the other end."""
        return _context(self, server)


@functools.lru_cache(maxsize=4)  # replica 0 connects to every host, and to make one takes as long as a handshake
def _context(identity: Identity, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(identity.certificate, identity.key)
    context.load_verify_locations(identity.authority)
    if server:
        context.num_tickets = 0  # nobody comes twice
        if identity.client_authority:
            context.load_verify_locations(cadata=identity.client_authority)
    return context


def is_client(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end has shown a client's certificate, not a host's."""
    certificate = writer.get_extra_info("peercert")
    if not certificate:
        return False
    from torchx_monarch.transport.credentials import CLIENT_AUTHORITY

    return (("commonName", CLIENT_AUTHORITY),) in certificate["issuer"]


async def listen(address: Address, serve: Serve, identity: Identity | None, bind: str, peer_timeout: float) -> Listener:
    """Serve every connection that is made to the address.

    Args:
        address: where.
        serve: called with each connection, after its handshake; ``Listener.mark_authenticated`` says that it may stay.
        identity: ours, for ``tls``.
        bind: local address to listen on; empty for all.
        peer_timeout: seconds of silence from a machine that is gone until its connection breaks.

    Raises:
        ConnectError: it cannot be listened on.
    """
    try:
        if not address.networked:
            return Listener(_socket_file(address.path), serve, None, messages.MAX_LINE)
        context = identity.context(server=True) if identity else None
        listening = _port(bind, address.port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConnectError(f"cannot listen for the other hosts at {address.path or address}: {reason}") from None

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watch_peer(writer, peer_timeout)
        await serve(reader, writer)

    return Listener(listening, accepted, context, messages.MAX_LINE)


def _socket_file(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a replica 0 that was replaced
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
    address: Address, identity: Identity | None, peer_timeout: float, patience: float = PATIENCE
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to where replica 0 listens.

    Args:
        address: where.
        identity: ours, where the address is one of TLS.
        peer_timeout: seconds of silence from a machine that is gone until the connection breaks.
        patience: seconds for the handshake.

    Raises:
        ConnectError: in words why not.
    """
    limit = messages.MAX_LINE
    try:
        if not address.networked:
            return await asyncio.open_unix_connection(address.path, limit=limit)
        connection = await asyncio.wait_for(_dial(address), CONNECT_TIMEOUT)
        reader, writer = await asyncio.open_connection(
            limit=limit,
            sock=connection,
            ssl=identity.context(server=False) if identity else None,
            server_hostname=address.host if identity else None,
            ssl_handshake_timeout=patience if identity else None,
        )
    except (OSError, asyncio.TimeoutError, ValueError, OverflowError) as error:
        raise explain(error, address) from None
    watch_peer(writer, peer_timeout)
    return reader, writer


async def _dial(address: Address) -> socket.socket:
    if not 0 < address.port < 65536:  # the resolver would take it modulo 65536
        raise OverflowError("a port is a number from 1 to 65535")
    loop = asyncio.get_running_loop()
    failure = OSError(f"{address.host} has no address")
    for family, kind, number, _, where in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, number)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, where)
            return connection
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:  # cancelled: no time is left
            connection.close()
            raise
    raise failure


def watch_peer(writer: asyncio.StreamWriter, seconds: float) -> None:
    """Have the kernel break the connection when the other machine has not answered for so long."""
    connection = writer.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Idle for two fifths, then three probes: the last goes unanswered at the end. USER_TIMEOUT is for data under way.
    interval = max(1, round(seconds / 5))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
