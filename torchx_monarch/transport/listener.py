# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who comes in where replica 0 listens, and how many may stand there without having said who they are.

Anybody who reaches the port can connect to it and stay silent. So a connection is a stranger until whoever serves it
says otherwise; strangers are few, each has a limited time, and when there are too many the oldest makes room: a real
host is past this point within milliseconds. What a stranger does wrong ends its connection and says nothing in any log.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import socket
import ssl
from collections.abc import Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_STRANGERS = 256
"""At most so many at a time; the others wait in the kernel's queue, which takes thousands. A connection under TLS costs
some 100 kB and its handshake 2 ms of processor time: even a job of thousands of hosts comes in no faster with more."""

_IN_A_CROWD = 3.0
"""Seconds that a stranger has at least, however many others want in: the other end may be busy with its own start."""

_AT_MOST = 20.0
"""Seconds that it has in any case; more than the handshake and the greeting may take by their own limits."""

_HANDSHAKE_TIMEOUT = 5.0

_CLOSE_TIMEOUT = 1.0
"""Seconds for the last bytes, and under TLS for the other end's farewell, which asyncio would await for 30 s."""


class _TLS(asyncio.sslproto.SSLProtocol):
    """asyncio's TLS with two changes, which nothing public allows; where its inside differs it stays as it is.

    Each connection of a server has a buffer of 256 kB, all of it written to, of which it uses what one read brings: for
    a thousand hosts that is a quarter of a gigabyte. A record of TLS has 16 kB.

    When a handshake fails, the alert that tells the other end why is made and not sent (CPython up to 3.13).
    """

    max_size = 1 << 14

    def _fatal_error(self, exc: BaseException, message: str = "Fatal error on transport") -> None:
        outgoing = getattr(self, "_outgoing", None) or getattr(getattr(self, "_sslpipe", None), "_outgoing", None)
        if isinstance(exc, ssl.SSLError) and outgoing is not None and self._transport is not None:
            self._transport.write(outgoing.read())  # type: ignore[attr-defined]
        super()._fatal_error(exc, message)


asyncio.sslproto.SSLProtocol = _TLS  # type: ignore[misc]


class Listener:
    """Accepts the connections of one listening socket.

    Args:
        listening: the socket.
        serve: called with each connection, after its handshake; the connection is closed when it returns.
        context: for TLS.
        limit: bytes of the longest line that is read from a connection.
    """

    def __init__(self, listening: socket.socket, serve: Serve, context: ssl.SSLContext | None, limit: int) -> None:
        self._listening = listening
        self._serve = serve
        self._context = context
        self._limit = limit
        self._strangers: dict[asyncio.Task[None], asyncio.TimerHandle] = {}  # until when; the oldest is the first
        self._all: set[asyncio.Task[None]] = set()  # held, or the loop might drop them
        listening.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())

    def mark_authenticated(self) -> None:
        """The connection that the calling task serves has said who it is, and may stay."""
        task = asyncio.current_task()
        assert task is not None
        self._only_authenticated(task)

    def close(self) -> None:
        """Let nobody in any more; those who are stay."""
        self._accepting.cancel()
        self._accepting.add_done_callback(lambda _: self._listening.close())  # when the loop no longer watches it
        for task in list(self._strangers):
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._strangers) >= _STRANGERS and not self._make_room(_IN_A_CROWD):
                await asyncio.sleep(0.01)
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError:  # no more files may be open, or the other end has gone again
                self._make_room(0.0)
                await asyncio.sleep(0.01)
                continue
            task = loop.create_task(self._receive(connection))
            self._all.add(task)
            self._strangers[task] = loop.call_later(_AT_MOST, task.cancel)
            task.add_done_callback(self._all.discard)
            task.add_done_callback(self._only_authenticated)

    def _only_authenticated(self, task: asyncio.Task[None]) -> None:
        if timer := self._strangers.pop(task, None):
            timer.cancel()

    def _make_room(self, age: float) -> bool:
        """Send the oldest stranger away, if it is of that age in seconds."""
        oldest, timer = next(iter(self._strangers.items()), (None, None))
        if oldest is None or timer is None or asyncio.get_running_loop().time() < timer.when() - _AT_MOST + age:
            return False
        self._only_authenticated(oldest)
        oldest.cancel()
        return True

    async def _receive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=self._limit)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE_TIMEOUT if self._context else None,
            )
        except OSError as error:  # no handshake, or none in time, or without a certificate that counts
            connection.close()
            # Its frames hold the future that holds it, and the buffers: all that would wait for the collector.
            error.__traceback__ = None
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await self._serve(reader, writer)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), _CLOSE_TIMEOUT)
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            transport.abort()
