# SPDX-License-Identifier: BSD-3-Clause
"""Open asyncio streams over a connected socket, with or without TLS.

asyncio's functions for TLS always create asyncio's own ``SSLProtocol``. So a connection is opened here as they open it
(``BaseSelectorEventLoop._make_ssl_transport``), with a subclass: an SSL protocol on top of a plain transport. TLS
connections of other code in this process are not affected.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import socket
import ssl


class _TLSProtocol(asyncio.sslproto.SSLProtocol):
    """asyncio's TLS protocol with two changes that no public API allows.

    The read buffer is smaller. asyncio gives each connection a buffer of 256 kB and touches all of it, a quarter of a
    gigabyte for a thousand hosts. A read uses little of it: a TLS record has at most 16 kB.

    A failed handshake sends its alert, which tells the peer the reason. CPython up to 3.13 creates it and drops it.
    """

    max_size = 1 << 14

    def _fatal_error(self, exc: BaseException, message: str = "Fatal error on transport") -> None:
        # Python 3.10 keeps the bytes to send in _sslpipe.
        outgoing = getattr(self, "_outgoing", None) or getattr(getattr(self, "_sslpipe", None), "_outgoing", None)
        if isinstance(exc, ssl.SSLError) and outgoing is not None and self._transport is not None:
            self._transport.write(outgoing.read())  # type: ignore[attr-defined]
        super()._fatal_error(exc, message)


async def open_streams(
    connection: socket.socket,
    limit: int,
    context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    handshake_timeout: float | None = None,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open streams over a connected socket, after the TLS handshake if there is one.

    The streams own the socket; it is closed when this fails or is cancelled.

    Args:
        limit: longest line in bytes that is read.
        context: SSL context; None without TLS.
        server_hostname: name that the peer's certificate must have, for the connecting end of TLS; None for the
            accepting end.
        handshake_timeout: seconds for the TLS handshake; None for asyncio's 60.

    Raises:
        OSError: the connection broke, or the TLS handshake failed or timed out.
        ValueError: the name cannot be that of a certificate.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport: asyncio.Transport | None = None
    try:
        if context is None:
            transport, _ = await loop.create_connection(lambda: protocol, sock=connection)
            return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        done = loop.create_future()
        tls = _TLSProtocol(
            loop,
            protocol,
            context,
            done,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            ssl_handshake_timeout=handshake_timeout,  # type: ignore[arg-type]  # typeshed: int
        )
        encrypted = tls._app_transport
        transport, _ = await loop.create_connection(lambda: tls, sock=connection)
        await done
    except BaseException:
        if transport is not None:
            transport.abort()
        else:
            connection.close()
        raise
    return reader, asyncio.StreamWriter(encrypted, protocol, reader, loop)
