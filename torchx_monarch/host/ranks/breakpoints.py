# SPDX-License-Identifier: BSD-3-Clause
"""Connect ranks that wait in a breakpoint with replica 0.

A rank connects in ``breakpoint()`` (``rank_debugger``) and sends its number and where it is, a JSON line; the kernel
tells its process id. This host connects to replica 0 for it, with the greeting ``breakpoint``, and passes on the bytes
of both (``controller.rank_clients`` has their messages). Whichever ends first, the other connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable

from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import peer_pid

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

Connect = Callable[[messages.Message], Awaitable[Streams]]
"""Open a connection to replica 0 with a greeting; raises OSError or ConnectError."""

_PIECE = 1 << 16

_PLACE_TIMEOUT = 5.0
"""Seconds for a rank to say where it is."""

_MAX_TEXT = 1000
"""Characters of a file's path or a function's name."""


class Breakpoints:
    """Serve the breakpoints of this host's ranks.

    Attributes:
        path: socket file to which ranks connect.
    """

    def __init__(self, folder: str, wait: float, connect: Connect, say: Callable[[str], None]) -> None:
        self.path = os.path.join(folder, "debug")
        self._wait = wait
        self._connect = connect
        self._say = say
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen, unless it does; if that fails ranks do not wait in breakpoints."""
        with contextlib.suppress(OSError):
            self._server = self._server or await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            place = await messages.receive(reader, _PLACE_TIMEOUT)
            if place is None or type(rank := place.get("rank")) is not int:
                return
            greeting = {**_checked(place), "type": "breakpoint", "rank": rank, "pid": peer_pid(writer)}
            try:
                near, far = await self._connect({**greeting, "wait": self._wait})
            except Exception as error:
                self._say(f"rank {rank} goes on without a debugger: replica 0 is not reached: {error}")
                return
            returning = asyncio.ensure_future(pass_on(near, writer))
            try:
                returning.add_done_callback(lambda _: writer.close())  # which ends the other direction
                await pass_on(reader, far)
                await messages.send(far, {"type": "end", "reason": "has ended"})
            finally:
                returning.cancel()
                far.close()
        except (messages.ProtocolError, TimeoutError):
            pass  # the rank has ended, or sends something else
        finally:
            writer.close()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on the bytes of a connection to another one, until either ends."""
    with contextlib.suppress(OSError, RuntimeError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()


def _checked(place: messages.Message) -> messages.Message:
    """Return the fields that say where a rank is, with values of their types: the program may send what it likes."""
    line = place.get("line")
    return {
        "file": str(place.get("file"))[:_MAX_TEXT],
        "line": line if type(line) is int else 0,
        "function": str(place.get("function"))[:_MAX_TEXT],
    }
