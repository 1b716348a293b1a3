# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A client's connection to the replica 0 of a role: blocking, for programs and notebooks that have no event loop."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
from typing import Any

from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.transport import messages
from torchx_monarch.transport.address import REPLICA0_NAME, Address, explain

TIMEOUT = 15.0
"""Seconds for a connection, and for an answer that is not waited for otherwise."""


class Connection:
    """One connection; a context manager.

    Args:
        connection: the socket.
        where: what it leads to, for messages.
    """

    def __init__(self, connection: socket.socket, where: Address) -> None:
        self._socket = connection
        self._where = where
        self._buffer = b""
        self._lines: list[bytes] = []

    @classmethod
    def open(cls, target: Target, greeting: dict[str, Any], timeout: float = TIMEOUT) -> Connection:
        """Connect and send the greeting.

        Args:
            target: where to.
            greeting: with its ``type``.
            timeout: seconds.

        Raises:
            UnreachableError: there is no connection; the message says why.
        """
        try:
            data = messages.encode({"version": messages.VERSION, "role": target.role, **greeting})
        except messages.ProtocolError as error:
            raise UnreachableError(f"the request is too long: {error}", final=True) from None
        link = cls(_connected(target, timeout), target.address)
        try:
            link.send_bytes(data)
        except BaseException:
            link.close()
            raise
        return link

    def send_bytes(self, data: bytes) -> None:
        """Send something beyond the greeting.

        Raises:
            UnreachableError: the connection is broken.
        """
        try:
            self._socket.settimeout(None)
            self._socket.sendall(data)
        except OSError as error:
            raise UnreachableError(f"{self._where}: the connection broke: {error.strerror or error}") from None

    def receive(self, timeout: float | None = TIMEOUT) -> dict[str, Any] | None:
        """The next message; None at the end of the connection.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            TimeoutError: nothing has come in time; one may go on.
            RefusedError: the other end refuses what it was asked; the message is its own.
            UnreachableError: what has come is no message of ours.
        """
        while not self._lines:
            try:
                self._socket.settimeout(timeout)
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except ssl.SSLError as error:
                raise UnreachableError(str(explain(error, self._where))) from None
            except OSError:
                data = b""
            if not data:
                return None
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            self._lines = lines
        try:
            message = messages.decode(self._lines.pop(0))
        except messages.ProtocolError:
            raise UnreachableError(f"{self._where}: what listens there is another program") from None
        if "frame" in message:  # a longer line, which is read as any other
            return self.receive(timeout)
        if message.get("type") == "refused":
            raise RefusedError(str(message.get("reason")))
        return message

    def close(self) -> None:
        """Hang up; a thread that is receiving gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(target: Target, greeting: dict[str, Any], timeout: float = TIMEOUT) -> dict[str, Any]:
    """Send one request and return its one answer.

    Raises:
        UnreachableError: there is no connection, or no answer within ``timeout`` seconds.
        RefusedError: the other end refuses.
    """
    with Connection.open(target, greeting, timeout) as link:
        try:
            answer = link.receive(timeout)
        except TimeoutError:
            raise UnreachableError(f"{target.address}: no answer within {timeout:g} s") from None
    if answer is None:
        raise UnreachableError(f"{target.address}: it hung up")
    return answer


def _connected(target: Target, timeout: float) -> socket.socket:
    address = target.address
    context = _context(target) if address.scheme == "tls" else None
    connection: socket.socket | None = None
    try:
        if not address.networked:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout)
            connection.connect(address.path)
            return connection
        connection = socket.create_connection((address.host, address.port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return context.wrap_socket(connection, server_hostname=REPLICA0_NAME) if context else connection
    except (OSError, ValueError) as error:
        if connection is not None:
            connection.close()
        hint = ""
        if address.networked and not isinstance(error, ssl.SSLError):
            hint = ". From outside its network: forward the port, and give its near end as address (docs/live.md)"
        why = explain(error, address)
        # At an address that the scheduler gives, another program may listen until the host there is ready: addresses of
        # pods are used again.
        raise UnreachableError(f"{why}{hint}", why.final and target.given) from None


def _context(target: Target) -> ssl.SSLContext:
    if not target.credentials:
        raise UnreachableError(
            f"{target.address}: there is no certificate to reach it with. The machine that submitted the job keeps it, "
            "in its state directory, as clients/SCHEDULER/APP",
            final=True,
        )
    from torchx_monarch.transport.credentials import ClientCredentials

    credentials = ClientCredentials.from_text(target.credentials)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=credentials.authority)
    # Python reads a certificate from files alone.
    with tempfile.TemporaryDirectory(prefix="tm-client") as folder:
        path = os.path.join(folder, "client.pem")
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(credentials.leaf.certificate + credentials.leaf.key)
        context.load_cert_chain(path)
    return context
