# SPDX-License-Identifier: BSD-3-Clause
"""Connections between hosts: listening on an address, connecting to it, and the certificates of both ends.

A socket file has mode 0600, in a folder of mode 0700. With TLS both ends show a certificate of the job's authority. A
cut network link produces no error. The kernel therefore probes silent connections and breaks one after
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
import struct
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from torchx_monarch.system import processes
from torchx_monarch.transport import messages
from torchx_monarch.transport.address import Address, AddressError, ConnectError, explain

if TYPE_CHECKING:
    from torchx_monarch.transport.credentials import HostCredentials

__all__ = ["Address", "AddressError", "ConnectError", "Identity", "Listener", "connect", "explain", "is_client"]

HANDSHAKE_TIMEOUT = 15.0
"""Seconds for a TLS handshake with replica 0, 0.6 ms of its CPU time; of thousands, each waits for those before it."""

_BACKLOG = 4096
"""All hosts of a large job connect within a second. The kernel uses the smaller of this and net.core.somaxconn."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_MAX_UNAUTHENTICATED = 256
"""Most unauthenticated connections at a time. Thousands more wait in the kernel's queue: handshakes take CPU time."""

_MIN_AGE_AT_LIMIT = 3.0
"""Seconds that an unauthenticated connection has even at the limit: the peer may be busy with its start."""

_AUTHENTICATION_TIMEOUT = 30.0
"""Seconds after which an unauthenticated connection is closed, by when handshake and greeting have timed out."""

_ACCEPT_TIMEOUT = 5.0
"""Seconds for a TLS handshake with a peer that has connected."""

_CLOSE_TIMEOUT = 1.0
"""Seconds to flush the last bytes and, under TLS, to wait for the peer's close_notify, for which asyncio waits 30 s."""


@dataclasses.dataclass(frozen=True, repr=False)
class Identity:
    """The certificate and key of this host, and the authorities that it trusts.

    The first three are paths of files; the client's authority is PEM, empty when no client is accepted.
    """

    certificate: str
    key: str
    authority: str
    client_authority: str = ""

    @classmethod
    def from_credentials(cls, credentials: HostCredentials, names: Iterable[str], folder: str) -> Identity:
        """Sign a certificate for this host and write it, its key and the authority to files in a folder (mode 0700)."""
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
        return self.certificate, self.key, self.authority

    # Replica 0 connects to every host, and a context takes as long to create as a handshake.
    @functools.lru_cache(maxsize=4)  # noqa: B019  # a process has one identity
    def context(self, server: bool) -> ssl.SSLContext:
        """Return an SSL context for TLS 1.3 that requires a certificate from the peer."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        if server:
            context.num_tickets = 0  # tickets resume sessions, and no host or client connects twice
            if self.client_authority:
                context.load_verify_locations(cadata=self.client_authority)
        return context


def is_client(writer: asyncio.StreamWriter) -> bool:
    """Return whether the peer has shown a client's certificate rather than a host's."""
    certificate = writer.get_extra_info("peercert")
    if not certificate:
        return False
    from torchx_monarch.transport.credentials import CLIENT_AUTHORITY

    return (("commonName", CLIENT_AUTHORITY),) in certificate["issuer"]


def _socket_file(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by an earlier replica 0 that this one replaces
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        listening.close()
        raise
    return listening


def _port(bind: str, port: int) -> socket.socket:
    both = not bind and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in bind else socket.AF_INET
    return socket.create_server((bind, port), family=family, dualstack_ipv6=both)


async def connect(
    address: Address, identity: Identity | None, peer_timeout: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the address of replica 0, with this host's certificate; ``peer_timeout`` is as for ``watch_peer``."""
    try:
        if not address.networked:
            return await asyncio.open_unix_connection(address.path, limit=messages.MAX_LINE)
        context = identity.context(server=False) if identity else None
        where = {"host": address.host, "port": address.port}
        reader, writer = await messages.open_streams(where, context, address.host, HANDSHAKE_TIMEOUT)
    except (OSError, asyncio.TimeoutError, ValueError, OverflowError) as error:
        raise explain(error, address) from None
    watch_peer(writer, peer_timeout)
    return reader, writer


def peer_pid(writer: asyncio.StreamWriter) -> int:
    """Return the id of the process at the other end of a unix socket, as the kernel knows it."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


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
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(seconds * 1000)))


class Listener:
    """Listen on an address and serve every connection.

    Args:
        serve: called with each connection after its handshake. It calls ``mark_authenticated`` once the peer has
            identified itself; until then the listener may close the connection, which ends when it returns.
        bind: local IP address to listen on; empty for all.
        peer_timeout: as for ``watch_peer``.
        say: called with a line for the log, once, if connections wait because this process may open no more files.
        bound: a socket with the port of the address; None to open it.
    """

    def __init__(
        self,
        address: Address,
        serve: Serve,
        identity: Identity | None,
        bind: str,
        peer_timeout: float,
        say: Callable[[str], None] | None = None,
        bound: socket.socket | None = None,
    ) -> None:
        try:
            self._context = identity.context(server=True) if identity and address.networked else None
            if bound is None:
                bound = _port(bind, address.port) if address.networked else _socket_file(address.path)
            bound.listen(_BACKLOG)
            self._listening = bound
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectError(f"cannot listen for the other hosts at {address.path or address}: {reason}") from None
        self._serve = serve
        self._peer_timeout = peer_timeout
        self._say = say
        self._unauthenticated: dict[asyncio.Task[None], asyncio.TimerHandle] = {}  # with their time-outs; oldest first
        self._all: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only
        self._listening.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())

    def mark_authenticated(self) -> None:
        """Mark the connection that the calling task serves as authenticated: the listener no longer closes it."""
        task = asyncio.current_task()
        assert task is not None
        self._forget_unauthenticated(task)

    def close(self) -> None:
        """Stop accepting and close unauthenticated connections; authenticated ones stay open."""
        self._accepting.cancel()
        self._accepting.add_done_callback(lambda _: self._listening.close())  # after the loop has removed its reader
        for task in list(self._unauthenticated):
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._unauthenticated) >= _MAX_UNAUTHENTICATED and not self._make_room(_MIN_AGE_AT_LIMIT):
                await asyncio.sleep(0.01)
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # too many open files, or the peer closed the connection before it was accepted
                if (hint := processes.limit_hint(error)) and self._say is not None:
                    self._say(f"hosts and clients wait for their connection: {error.strerror}{hint}")
                    self._say = None
                self._make_room(0.0)
                await asyncio.sleep(0.01)
                continue
            task = loop.create_task(self._receive(connection))
            self._all.add(task)
            self._unauthenticated[task] = loop.call_later(_AUTHENTICATION_TIMEOUT, task.cancel)
            task.add_done_callback(self._all.discard)
            task.add_done_callback(self._forget_unauthenticated)
            # A task that is cancelled before its first step does not close the connection.
            task.add_done_callback(lambda _, connection=connection: connection.close())  # type: ignore[misc]

    def _forget_unauthenticated(self, task: asyncio.Task[None]) -> None:
        if timer := self._unauthenticated.pop(task, None):
            timer.cancel()

    def _make_room(self, age: float) -> bool:
        """Close the oldest unauthenticated connection if it is at least ``age`` seconds old; return whether it was."""
        oldest, timer = next(iter(self._unauthenticated.items()), (None, None))
        now = asyncio.get_running_loop().time()
        if oldest is None or timer is None or now < timer.when() - _AUTHENTICATION_TIMEOUT + age:
            return False
        self._forget_unauthenticated(oldest)
        oldest.cancel()
        return True

    async def _receive(self, connection: socket.socket) -> None:
        try:
            reader, writer = await messages.open_streams(
                {"sock": connection}, self._context, server_hostname=None, handshake_timeout=_ACCEPT_TIMEOUT
            )
        except (OSError, asyncio.TimeoutError) as error:  # no handshake (in time), or the certificate is not accepted
            # The traceback's frames refer to the future that holds the error: a cycle that keeps the buffers alive.
            error.__traceback__ = None
            return
        watch_peer(writer, self._peer_timeout)
        try:
            await self._serve(reader, writer)
            if not writer.is_closing():
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), _CLOSE_TIMEOUT)
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            with contextlib.suppress(AttributeError):  # of a transport that has ended by itself (CPython 3.10 to 3.13)
                writer.transport.abort()
