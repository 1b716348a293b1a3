# SPDX-License-Identifier: BSD-3-Clause
"""The address of replica 0, and explanations of failed connections to it. Used by hosts and by a user's client."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import ipaddress
import os
import re
import socket
import ssl

_PORT = re.compile(r"[0-9]{1,5}")

CONNECT_TIMEOUT = 4.0
"""Seconds for a TCP connection. Less than the 5 s before a waiting host prints its first "waiting for" line
(``insight.progress``), so that the line can give the reason."""

REPLICA0_NAME = "replica0.torchx-monarch.internal"
"""A name that only the certificate of a role's replica 0 contains. A user's client verifies this name whatever address
it dials, because the address may be the local end of a tunnel."""


class AddressError(ValueError):
    """The text is not an address of one of the three forms."""


class ConnectError(Exception):
    """The connection failed; the message says why. A retry of a ``final`` failure would be useless."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclasses.dataclass(frozen=True)
class Address:
    """The address on which replica 0 listens: a ``path`` of scheme ``unix``, else host and port."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, source: str) -> Address:
        """Parse ``unix:PATH``, ``tls:HOST:PORT`` or ``insecure-tcp:HOST:PORT``."""
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest:
            return cls(scheme, path=rest)
        host, _, port = rest.rpartition(":")
        if scheme in ("tls", "insecure-tcp") and host and _PORT.fullmatch(port) and 0 < int(port) < 65536:
            if ":" in host:
                raise AddressError(
                    f"{source}={text!r}: an IPv6 address cannot be dialled by Monarch; give a name for it"
                )
            return cls(scheme, host, int(port))
        raise AddressError(f"{source}={text!r} is not of the form unix:PATH, tls:HOST:PORT or insecure-tcp:HOST:PORT")

    @property
    def networked(self) -> bool:
        """Whether hosts on other machines can reach the address."""
        return self.scheme != "unix"

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.scheme == "unix" else f"{self.scheme}:{self.host}:{self.port}"


def as_ipv6(host: str) -> str:
    """Return the IPv6 form of an IPv4 address, by which the kernel reaches it too; empty for a name."""
    try:
        return f"::ffff:{ipaddress.IPv4Address(host)}"
    except ValueError:
        return ""


def explain(error: BaseException, address: Address) -> ConnectError:
    """Convert an exception of a connection attempt into a ``ConnectError`` that names the address and the cause."""
    where = f"{address.host}:{address.port}" if address.networked else address.path
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not accepted: {error.verify_message}"
        return ConnectError(f"{where}: {why} (it belongs to another job or name, or a clock is wrong)", final=True)
    if isinstance(error, ssl.SSLError):
        return ConnectError(f"{where}: the TLS handshake failed, perhaps with another program: {error.reason or error}")
    if isinstance(error, ConnectionAbortedError) and not error.errno:  # asyncio raises it when the handshake times out
        return ConnectError(f"{where}: no answer to the TLS handshake: it is another program, or busy")
    if isinstance(error, socket.gaierror):
        return ConnectError(f"{where}: the name {address.host!r} cannot be resolved: {error.strerror}")
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return ConnectError(f"{where}: unreachable: no answer within {CONNECT_TIMEOUT:g} s (a firewall, or a cut link)")
    if isinstance(error, (ValueError, OverflowError)):  # includes UnicodeError: the name cannot be encoded
        return ConnectError(f"{where}: this is no address that can be dialled: {error}", final=True)
    number = error.errno if isinstance(error, OSError) else None
    if failures := re.findall(r"\[Errno (\d+)\]", str(error)):  # of asyncio: a name may have several addresses
        number = int(failures[-1])
    if number == errno.ECONNREFUSED:
        return ConnectError(f"{where}: connection refused: nothing listens there (yet)")
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT):
        return ConnectError(f"{where}: unreachable: {os.strerror(number)}")
    # asyncio's error has no text when the peer breaks the connection during the handshake.
    why = getattr(error, "strerror", None) or str(error) or "the connection broke in the handshake"
    return ConnectError(f"{where}: {why}")
