# SPDX-License-Identifier: BSD-3-Clause
"""Requests of the leader to the hosts, over the connections with which they have registered.

=============  =======================================================================================================
``request``    leader to host: ``id``, ``name`` of the request (see ``host_messages``) and its ``fields``
``cancel``     leader to host: nobody waits for the answer to ``id`` any more
``answer``     host to leader: ``id``, and the ``answer``, or the text of an ``error``
=============  =======================================================================================================

A host executes its requests side by side and answers each when it is done, so answers arrive in any order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping

from torchx_monarch.controller.host_messages import (
    Answer,
    Handler,
    Request,
    decode_answer,
    decode_request,
    encode_message,
    encode_request,
)
from torchx_monarch.transport import messages


class HostError(Exception):
    """A host has not answered a request: its connection has ended, or its answer is not valid."""


class HostCall:
    """A request to some hosts.

    Attributes:
        number: the id of the request.
        until: when all answers are due, by the time of the event loop; None for never.
        waiting: replicas of the hosts that have not answered.
        answers: the answers or errors that have arrived, each with the host's replica.
    """

    def __init__(self, number: int, replicas: Iterable[int], timeout: float | None = None) -> None:
        self.number = number
        self.until = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self.waiting = set(replicas)
        self.answers: asyncio.Queue[tuple[int, Answer | HostError]] = asyncio.Queue()

    async def next(self) -> tuple[int, Answer | HostError]:
        """Return the next answer or error, with the host's replica.

        Raises:
            asyncio.TimeoutError: it has not arrived in time.
        """
        left = None if self.until is None else self.until - asyncio.get_running_loop().time()
        return await asyncio.wait_for(self.answers.get(), left)

    def put(self, replica: int, answer: Answer | HostError) -> None:
        """Add the answer of a host, unless it has answered before."""
        if replica in self.waiting:
            self.waiting.discard(replica)
            self.answers.put_nowait((replica, answer))


class HostRequests:
    """Send requests to hosts, on the leader."""

    def __init__(self, writers: Mapping[int, asyncio.StreamWriter]) -> None:
        self._writers = writers
        self._numbers = itertools.count()
        self._calls: dict[int, HostCall] = {}

    def reaches(self, replica: int) -> bool:
        """Return whether a host other than this one is connected."""
        return replica in self._writers

    def begin(self, request: Request, replicas: Iterable[int], local: int, timeout: float | None = None) -> HostCall:
        """Send a request to hosts, and do not wait: a host that reads slowly delays no other.

        Args:
            local: the one of them that is not sent the request, because it is this process.
        """
        call = HostCall(next(self._numbers), replicas, timeout)
        name, fields = encode_request(request)
        data = messages.encode({"type": "request", "id": call.number, "name": name, "fields": fields})
        self._calls[call.number] = call
        for replica in call.waiting - {local}:
            if replica in self._writers:
                self._writers[replica].write(data)
            else:
                call.put(replica, HostError(f"host {replica} is not connected"))
        return call

    def end(self, call: HostCall) -> None:
        """Cancel a request on the hosts that have not answered it."""
        del self._calls[call.number]
        data = messages.encode({"type": "cancel", "id": call.number})
        for replica in call.waiting & self._writers.keys():
            self._writers[replica].write(data)

    def receive(self, replica: int, message: messages.Message) -> None:
        """Pass on the answer of a host to the call that waits for it, if one still does."""
        number = message.get("id")
        call = self._calls.get(number) if isinstance(number, int) else None
        if call is None:
            return
        try:
            answer = message.get("answer")
            call.put(replica, decode_answer(answer if isinstance(answer, dict) else {}))
        except ValueError as error:
            call.put(replica, HostError(str(message.get("error") or error)[:1000]))

    def drop(self, replica: int) -> None:
        """Have no call wait for a host whose connection has ended."""
        for call in self._calls.values():
            call.put(replica, HostError(f"the connection of host {replica} has ended"))


class HostResponder:
    """Execute the requests of the leader, on every other host.

    Args:
        handler: executes a request; it must not raise.
    """

    def __init__(self, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._writer = writer
        self._handler = handler
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def receive(self, message: messages.Message) -> None:
        """Start to execute a request, or cancel one; ignore every other message."""
        number = message.get("id")
        if message.get("type") == "request" and isinstance(number, int):
            task = self._tasks[number] = asyncio.ensure_future(self._answer(number, message))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        if message.get("type") == "cancel" and number in self._tasks:
            self._tasks[number].cancel()

    def close(self) -> None:
        """Cancel all requests: the leader is lost, or does not need the answers."""
        for task in self._tasks.values():
            task.cancel()

    async def _answer(self, number: int, message: messages.Message) -> None:
        try:
            request = decode_request(str(message.get("name")), message.get("fields") or {})
            answer = encode_message(await self._handler(request))
            data = messages.encode({"type": "answer", "id": number, "answer": answer})
        except (ValueError, messages.ProtocolError) as error:
            data = messages.encode({"type": "answer", "id": number, "error": str(error)[:1000]})
        await messages.send_bytes(self._writer, data)
