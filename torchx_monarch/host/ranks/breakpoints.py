# SPDX-License-Identifier: BSD-3-Clause
"""Connect ranks that wait in a breakpoint with their debuggers: each gets a terminal, whose other end is a client's.

A rank connects in ``breakpoint()`` (``rank_debugger``) and sends its number and where it is, a JSON line; the kernel
tells its process id. This host connects to replica 0 for it, with the greeting ``breakpoint``, and passes messages on
(``controller.debug_sessions`` lists them). When a client attaches, the rank gets a JSON line with the device of its
terminal, and answers with a byte. If none has attached in time, it gets an empty object, and does not wait again. The
connection to the rank is closed by the host when the rank is to go on without a debugger, and by the rank, after
another byte, when it is detached.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Awaitable, Callable
from typing import Any

from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import peer_pid

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

Connect = Callable[[messages.Message], Awaitable[Streams]]
"""Open a connection to replica 0 with a greeting; raises OSError or ConnectError."""

_PIECE = 4096
"""Bytes of a terminal's output in one message."""

_ANSWER_TIMEOUT = 5.0
"""Seconds for a rank to say where it is, and to open its terminal."""

_DRAIN_TIMEOUT = 1.0
"""Seconds for the rest of a terminal's output when its rank has ended or detached."""

_MAX_TEXT = 1000
"""Characters of a file's path or a function's name."""

_ENDED = "has ended"

_DETACHED = "goes on: its debugger was detached"

_LOST = "goes on: the connection of its debugger broke"


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
        pid = peer_pid(writer)
        try:
            place = await messages.receive(reader, _ANSWER_TIMEOUT)
            if place is None or type(rank := place.get("rank")) is not int:
                return
            greeting = {**_checked(place), "type": "breakpoint", "rank": rank, "pid": pid, "wait": self._wait}
            try:
                near, far = await self._connect(greeting)
            except Exception as error:
                self._say(f"rank {rank} goes on without a debugger: replica 0 is not reached: {error}")
                return
            try:
                reason = await self._session(pid, (reader, writer), (near, far))
                await messages.send(far, {"type": "end", "reason": reason})
            finally:
                far.close()
        except (OSError, messages.ProtocolError, TimeoutError, asyncio.TimeoutError):
            pass  # the rank has ended, or sends something else
        finally:
            writer.close()

    async def _session(self, pid: int, rank: Streams, client: Streams) -> str:
        """Wait for a client and pass on the messages of both sides; return why the session has ended."""
        ended = asyncio.ensure_future(rank[0].read(1))
        attached = asyncio.ensure_future(messages.receive(client[0]))
        try:
            await asyncio.wait([ended, attached], timeout=self._wait, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return _ENDED
            if not attached.done():
                await messages.send(rank[1], {})
                return f"goes on: no debugger was attached within {self._wait:g} s (-cfg debug_wait)"
            if (request := attached.result()) is None or request.get("type") != "attach":
                return _LOST
            try:
                near, far = os.openpty()
            except OSError as error:
                return f"goes on: its host cannot open a terminal: {error.strerror}"
            with contextlib.ExitStack() as unopened:
                unopened.callback(os.close, near)
                try:
                    terminal = _Pty(near, pid)
                    terminal.resize(request)
                    answer = {"terminal": os.ttyname(far), "kind": str(request.get("kind"))[:100]}
                    await messages.send(rank[1], answer)
                    if not await asyncio.wait_for(ended, _ANSWER_TIMEOUT):
                        return _ENDED
                finally:
                    os.close(far)
                unopened.pop_all()
        finally:
            ended.cancel()
            attached.cancel()
        return await terminal.relay(rank[0], *client)


class _Pty:
    """The host's end of a terminal of a rank with a process id; ``relay`` closes the descriptor."""

    def __init__(self, descriptor: int, pid: int) -> None:
        self._descriptor = descriptor
        self._pid = pid

    def resize(self, message: messages.Message) -> None:
        """Set the size that a message has, ``rows`` and ``columns``."""
        rows, columns = (_size_of(message.get(name)) for name in ("rows", "columns"))
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def relay(
        self, rank: asyncio.StreamReader, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        """Pass on output to a client's writer and input from its reader until one side ends; return why.

        The connection to the rank ends when the rank does, or detaches.
        """
        loop = asyncio.get_running_loop()
        output = asyncio.StreamReader(_PIECE)
        os.set_blocking(self._descriptor, False)
        file = os.fdopen(self._descriptor, "rb", 0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), file)
        detached = asyncio.ensure_future(rank.read(1))
        shown = asyncio.ensure_future(self._show(output, writer))
        typed = asyncio.ensure_future(self._type(reader))
        try:
            await asyncio.wait([detached, shown, typed], return_when=asyncio.FIRST_COMPLETED)
            if typed.done():
                return typed.result()
            await asyncio.wait([shown], timeout=_DRAIN_TIMEOUT)
            return _DETACHED if detached.done() and detached.result() else _ENDED
        finally:
            for task in (detached, shown, typed):
                task.cancel()
            transport.close()

    async def _show(self, output: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # EIO: no process has the other end open
            while data := await output.read(_PIECE):
                await messages.send(writer, {"type": "output", "data": data.decode("latin-1")})

    async def _type(self, reader: asyncio.StreamReader) -> str:
        """Write a client's input to the terminal; return why there is no more."""
        while message := await messages.receive(reader):
            if message.get("type") == "input":
                await self._write(str(message.get("data")).encode("latin-1", "replace"))
            elif message.get("type") == "size":
                self.resize(message)
                self._signal(signal.SIGWINCH)
            elif message.get("type") == "detach":
                return _DETACHED
            else:
                break
        return _LOST

    async def _write(self, data: bytes) -> None:
        # The terminal is not the controlling terminal of the rank, whose process group gets no signals from it.
        attributes: Any = termios.tcgetattr(self._descriptor)
        if attributes[3] & termios.ISIG and attributes[6][termios.VINTR] in data:
            self._signal(signal.SIGINT)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.02)  # the rank does not read

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _checked(place: messages.Message) -> messages.Message:
    """Return the fields that say where a rank is, with values of their types: the program may send what it likes."""
    line = place.get("line")
    return {
        "file": str(place.get("file"))[:_MAX_TEXT],
        "line": line if type(line) is int else 0,
        "function": str(place.get("function"))[:_MAX_TEXT],
    }


def _size_of(value: object) -> int:
    return value if type(value) is int and 0 < value < 1 << 16 else 24
