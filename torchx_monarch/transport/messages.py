# SPDX-License-Identifier: BSD-3-Clause
"""JSON messages between the processes of a job, with a size limit and a protocol version in the greeting.

A message is one line that holds a JSON object. A header line with the length in bytes, ``{"frame": 123456}``, precedes
a message longer than ``MAX_LINE``, so that the reader can check the length before it reads the message.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import functools
import json
import ssl
import sys
import threading
from collections.abc import Coroutine, Mapping
from typing import Any

from torchx_monarch.transport.address import CONNECT_TIMEOUT

VERSION = 1
"""Protocol version, sent in every greeting. All processes of a job run the same release; other versions are refused."""

MAX_LINE = 1 << 16
"""Longest line in bytes. Nearly all messages are far shorter."""

MAX_MESSAGE = 1 << 23
"""Longest message in bytes. The largest real message is a command with its arguments and environment. Linux limits
these to 2 MiB (ARG_MAX), which can more than double in JSON."""

MAX_ERROR = 8000
"""Longest text in characters in which a host reports why it cannot take part. JSON can use six bytes per character."""

Message = dict[str, Any]

_ENCODER = json.JSONEncoder(separators=(",", ":"), default=vars)  # dumps() would make one for each message


class ProtocolError(Exception):
    """Raised by the functions below: the data received is not a valid message, or a message is too long."""


def encode(message: Message) -> bytes:
    """Encode a message, with a header line if it is longer than ``MAX_LINE``; data classes become objects."""
    line = _ENCODER.encode(message).encode() + b"\n"
    if len(line) <= MAX_LINE:
        return line
    if len(line) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(line)} bytes is over the limit of {MAX_MESSAGE} bytes")
    return b'{"frame":%d}\n' % len(line) + line


def decode(line: bytes) -> Message:
    """Decode one line."""
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ProtocolError(f"not a JSON line: {line[:80]!r}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"not a JSON object: {line[:80]!r}")
    return message


async def receive(reader: asyncio.StreamReader, timeout: float | None = None) -> Message | None:
    """Receive the next message; return None when the peer has closed or broken the connection.

    ``TimeoutError`` is raised if no message arrives in time.

    Args:
        reader: a reader opened with ``limit=MAX_LINE``.
        timeout: seconds for a line, and again for a message after a header line; None for no limit.
    """
    message = await _receive(reader.readline(), timeout)
    if message is None or "frame" not in message:
        return message
    size = message["frame"]
    if not isinstance(size, int) or not 0 < size <= MAX_MESSAGE:
        raise ProtocolError(f"a message of {str(size)[:20]} bytes is over the limit of {MAX_MESSAGE} bytes")
    return await _receive(reader.readexactly(size), timeout)


async def _receive(reading: Coroutine[Any, Any, bytes], timeout: float | None) -> Message | None:
    try:
        line = await (reading if timeout is None else asyncio.wait_for(reading, timeout))
    except asyncio.IncompleteReadError:
        return None
    except ValueError:
        raise ProtocolError(f"a line is over the limit of {MAX_LINE} bytes") from None
    except (OSError, asyncio.TimeoutError) as error:  # in Python 3.10 asyncio.TimeoutError is not the builtin
        if timeout is None or (isinstance(error, OSError) and error.errno is not None):
            return None  # broken by the peer, or by the kernel with ETIMEDOUT, which is a TimeoutError too
        raise TimeoutError(f"no message within {timeout:g} s") from None
    return decode(line) if line.endswith(b"\n") else None


async def send(writer: asyncio.StreamWriter, message: Message) -> bool:
    """Send a message; return False when the connection is closed or broken."""
    return await send_bytes(writer, encode(message))


async def send_bytes(writer: asyncio.StreamWriter, data: bytes) -> bool:
    """Send an encoded message; return False when the connection is closed or broken."""
    try:
        writer.write(data)
        await writer.drain()
    except (OSError, RuntimeError):
        return False
    return True


@functools.lru_cache(maxsize=8)
def _read_buffer(thread: int) -> memoryview:
    return memoryview(bytearray(_TLSProtocol.max_size))


class _TLSProtocol(asyncio.sslproto.SSLProtocol):
    """asyncio's TLS protocol with one read buffer for all connections of a thread, which no public API allows.

    asyncio gives each connection 256 kB, and empties the buffer of one before it reads from another.
    """

    max_size = 1 << 14  # a TLS record has no more

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ssl_buffer = self._ssl_buffer_view = _read_buffer(threading.get_ident())


async def open_streams(
    where: Mapping[str, Any],
    context: ssl.SSLContext | None,
    server_hostname: str | None,
    handshake_timeout: float,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open streams over a connection, after the TLS handshake if there is a context.

    Args:
        where: ``host`` and ``port``, or a connected ``sock``, for asyncio's ``create_connection``.
        server_hostname: name that the peer's certificate must have; None for the accepting end of TLS.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE)
    protocol, done = asyncio.StreamReaderProtocol(reader), loop.create_future()

    def made() -> asyncio.BaseProtocol:
        if context is None:
            return protocol
        return _TLSProtocol(
            loop,
            protocol,
            context,
            done,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            ssl_handshake_timeout=handshake_timeout,
        )

    tls: Any
    transport, tls = await asyncio.wait_for(loop.create_connection(made, **where), CONNECT_TIMEOUT)
    if context is None:
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        await done
    except BaseException:
        transport.abort()
        raise
    secured = tls._app_transport
    if sys.version_info < (3, 11):
        # There a reader that has paused raises AttributeError here once the peer has closed; it holds all data by then.
        resume = secured.resume_reading
        secured.resume_reading = lambda: None if tls._transport is None else resume()
    return reader, asyncio.StreamWriter(secured, protocol, reader, loop)
