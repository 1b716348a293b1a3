# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Requests over the unix socket between a host process, which owns the ranks, and its agent, an actor of the mesh.

Each new mesh starts a new agent. The host process then kills the previous agent, because its controller may be gone.

Requests are ``{"id": n, "op": name, "args": {...}}``. Answers are ``{"id": n, "result": ...}`` or ``{"id": n, "error":
text}``, in any order, so that a ``stop`` request overtakes a ``watch`` request that waits for the ranks. From the first
request on, the host process sends heartbeats, ``{"alive": true}``, and the agent returns them. If an agent is silent
for longer than its lease, the host process kills it and counts it as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from torchx_monarch.model.host_spec import LEASE
from torchx_monarch.transport import messages
from torchx_monarch.transport.lease import Leases

SOCKET_VARIABLE = "MONARCH_AGENT_SOCKET"
"""The variable that holds the socket's path. The host process sets it; the Monarch process of the agent inherits it."""

Handler = Callable[[str, dict[str, Any]], Awaitable[Any]]


class AgentError(Exception):
    """The host process refused the request, or is gone."""


class AgentServer:
    """Answer the requests of the agent, in the host process.

    Args:
        path: socket file to create; its folder belongs to the job and has mode 0700.
        handler: executes a request, given its ``op`` and ``args``, and returns its result. The text of an exception is
            the answer's ``error``. ``controller.host_messages`` lists the requests.
        on_lost: called when the connection to the newest agent has ended. Its argument is the number of seconds for
            which the agent was silent, or 0 if the agent died.
        lease: seconds of silence after which the agent counts as lost.
    """

    def __init__(self, path: str, handler: Handler, on_lost: Callable[[float], None], lease: float = LEASE) -> None:
        self._path = path
        self._handler = handler
        self._on_lost = on_lost
        self._tasks: set[asyncio.Task[None]] = set()
        self._agent = 0
        self._closed = False
        self._silent: set[int] = set()
        self._leases: Leases[int] = Leases(lease, self._lease_expired)

    async def start(self) -> None:
        """Start to listen on the socket file."""
        self._leases.start()
        await asyncio.start_unix_server(self._serve, self._path, limit=messages.MAX_LINE)
        os.chmod(self._path, 0o600)

    def close(self) -> None:
        """End the agent and refuse others: the controller that has started it no longer gives orders."""
        agent, self._agent, self._closed = self._agent, 0, True
        if agent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.close()
            return
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        agent, _, _ = struct.unpack("3i", credentials)
        before, self._agent = self._agent, agent
        if before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(before, signal.SIGKILL)
        heartbeats: asyncio.Task[None] | None = None
        while request := await messages.receive(reader):
            self._leases.renew(agent)
            heartbeats = heartbeats or asyncio.ensure_future(self._send_heartbeats(writer))
            if "alive" not in request:
                task = asyncio.ensure_future(self._answer(request, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if heartbeats is not None:
            heartbeats.cancel()
        self._leases.drop(agent)
        writer.close()
        if self._agent == agent:
            self._on_lost(self._leases.seconds if agent in self._silent else 0.0)

    async def _send_heartbeats(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(self._leases.heartbeat)
            await messages.send(writer, {"alive": True})

    def _lease_expired(self, agent: int) -> None:
        self._silent.add(agent)
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)  # ends its connection, and so ``_serve``

    async def _answer(self, request: messages.Message, writer: asyncio.StreamWriter) -> None:
        try:
            answer = {"id": request["id"], "result": await self._handler(request["op"], request["args"])}
        except Exception as error:
            answer = {"id": request["id"], "error": str(error) or type(error).__name__}
        await messages.send(writer, answer)


class AgentClient:
    """Send requests to the host process, in the agent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._listener = asyncio.ensure_future(self._listen())

    @classmethod
    async def from_socket(cls, connection: socket.socket) -> AgentClient:
        """Create a client on a socket that is connected to the host process."""
        return cls(*await asyncio.open_unix_connection(sock=connection, limit=messages.MAX_LINE))

    async def request(self, op: str, args: dict[str, Any]) -> Any:
        """Send a request to the host process and return the result.

        Args:
            op: name of the operation.
            args: its arguments, as JSON values.

        Raises:
            AgentError: the host process answered with an error, whose text is the message, or it is gone.
        """
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await messages.send(self._writer, {"id": number, "op": op, "args": args})
        return await answer

    async def _listen(self) -> None:
        while answer := await messages.receive(self._reader):
            if "alive" in answer:
                await messages.send(self._writer, answer)
                continue
            waiting = self._waiting.pop(answer["id"])
            if "error" in answer:
                waiting.set_exception(AgentError(answer["error"]))
            else:
                waiting.set_result(answer["result"])
        for waiting in self._waiting.values():
            waiting.set_exception(AgentError("the host process has ended"))
