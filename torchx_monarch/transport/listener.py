# SPDX-License-Identifier: BSD-3-Clause
"""The listener of replica 0, with a limit on connections that have not authenticated.

Anyone who reaches the port can connect and stay silent. A connection therefore counts as unauthenticated until its
handler calls ``Listener.mark_authenticated``. The number of unauthenticated connections and the time of each are
limited. At the limit the oldest one is closed: a real host authenticates within milliseconds. An error on an
unauthenticated connection closes it and is not logged.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable

from torchx_monarch.system import open_files
from torchx_monarch.transport.streams import open_streams

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_MAX_UNAUTHENTICATED = 256
"""Most unauthenticated connections at a time. Further ones wait in the kernel's queue, which holds thousands. A TLS
connection takes some 100 kB, and its handshake 2 ms of CPU time, so a higher limit would not admit the thousands of
hosts of a large job any faster."""

_MIN_AGE_AT_LIMIT = 3.0
"""Seconds that an unauthenticated connection has even at the limit: the peer may be busy with its start."""

_AUTHENTICATION_TIMEOUT = 30.0
"""Seconds after which an unauthenticated connection is closed. More than the limits of the handshake, of a greeting's
header line and of its body together (5 s, and 10 s for either of the others)."""

_HANDSHAKE_TIMEOUT = 5.0

_CLOSE_TIMEOUT = 1.0
"""Seconds to flush the last bytes and, under TLS, to wait for the peer's close_notify, for which asyncio waits 30 s."""


class Listener:
    """Accept the connections of one listening socket.

    Args:
        serve: called with each connection after its handshake; the connection is closed when it returns.
        context: SSL context; None without TLS.
        limit: longest line in bytes that is read from a connection.
        say: called with a line for the log, once, if connections wait because this process may open no more files; None
            for no line.
    """

    def __init__(
        self,
        listening: socket.socket,
        serve: Serve,
        context: ssl.SSLContext | None,
        limit: int,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._listening = listening
        self._serve = serve
        self._context = context
        self._limit = limit
        self._say = say
        self._unauthenticated: dict[asyncio.Task[None], asyncio.TimerHandle] = {}  # with their time-outs; oldest first
        self._all: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only
        listening.setblocking(False)
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
                if (hint := open_files.hint(error)) and self._say is not None:
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
            task.add_done_callback(functools.partial(_close, connection))

    def _forget_unauthenticated(self, task: asyncio.Task[None]) -> None:
        if timer := self._unauthenticated.pop(task, None):
            timer.cancel()

    def _make_room(self, age: float) -> bool:
        """Close the oldest unauthenticated connection if it is at least ``age`` seconds old; return whether it was."""
        oldest, timer = next(iter(self._unauthenticated.items()), (None, None))
        if (
            oldest is None
            or timer is None
            or asyncio.get_running_loop().time() < timer.when() - _AUTHENTICATION_TIMEOUT + age
        ):
            return False
        self._forget_unauthenticated(oldest)
        oldest.cancel()
        return True

    async def _receive(self, connection: socket.socket) -> None:
        try:
            reader, writer = await open_streams(
                connection, self._limit, self._context, handshake_timeout=_HANDSHAKE_TIMEOUT
            )
        except OSError as error:  # the handshake failed or timed out, or the certificate is not accepted
            # The traceback's frames refer to the future that holds the error: a cycle that keeps the buffers alive.
            error.__traceback__ = None
            return
        try:
            await self._serve(reader, writer)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), _CLOSE_TIMEOUT)
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            writer.transport.abort()


def _close(connection: socket.socket, _task: asyncio.Task[None]) -> None:
    connection.close()
