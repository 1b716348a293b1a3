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


# OpenSSL's codes of X509_verify_cert errors (x509_vfy.h).
_NOT_YET_VALID, _EXPIRED, _WRONG_NAME, _WRONG_ADDRESS = 9, 10, 62, 64

_ALERTS = {
    # TLS alerts that the peer sends about this host's certificate.
    "UNKNOWN_CA": "it does not know the authority of this host's certificate: it belongs to another job",
    "CERTIFICATE_EXPIRED": "it takes this host's certificate for expired or not yet valid: compare the two clocks",
    # OpenSSL sends this alert for a certificate that is not valid yet.
    "BAD_CERTIFICATE": "it refuses this host's certificate, perhaps as not valid yet: compare the two clocks",
    "DECRYPT_ERROR": "this host's certificate is not signed by the authority that it knows: it belongs to another job",
}


def explain(error: BaseException, address: Address) -> ConnectError:
    """Convert an exception of a connection attempt into a ``ConnectError`` that names the address and the cause."""
    where = f"{address.host}:{address.port}" if address.networked else address.path
    if isinstance(error, ssl.SSLError):
        why = _why_no_tls(error, address.host)
        return ConnectError(f"{where}: {why or f'the TLS handshake failed: {error.reason or error}'}", final=bool(why))
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


def _why_no_tls(error: ssl.SSLError, host: str) -> str:
    """Return why no other try can succeed; empty if it may."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return "its certificate has expired: the job is older than its certificates may be, or a clock is wrong"
        if error.verify_code == _NOT_YET_VALID:
            return (
                "its certificate is not valid yet by the clock of this machine: the two clocks differ by over an hour"
            )
        if error.verify_code in (_WRONG_NAME, _WRONG_ADDRESS):
            return f"its certificate is for another name than {host!r}: advertise the name that hosts dial"
        return f"its certificate is not of this job's authority ({error.verify_message}): it belongs to another job"
    reason = str(error.reason or "")
    if re.search("WRONG_VERSION_NUMBER|UNEXPECTED_MESSAGE|PACKET_LENGTH|RECORD_LAYER", reason):
        return "what listens there does not speak TLS: it is another program"
    return next((why for alert, why in _ALERTS.items() if alert in reason), "")
