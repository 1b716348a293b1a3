# SPDX-License-Identifier: BSD-3-Clause
"""Requests of the leader to the hosts, over the connections with which they have registered.

=============  =======================================================================================================
``request``    leader to host: ``id``, ``name`` of the request (see ``host_messages``) and its ``fields``
``cancel``     leader to host: nobody waits for the answer to ``id`` any more
``answer``     host to leader: ``id``, and the ``answer``, a refusal (``refused``), or the text of an ``error``
=============  =======================================================================================================

A host executes its requests side by side and answers each when it is done, so answers arrive in any order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Generic

from torchx_monarch.controller.host_messages import (
    AnswerT,
    Handler,
    HostError,
    HostRefused,
    Request,
    decode_request,
)
from torchx_monarch.model.codec import decode
from torchx_monarch.transport import messages


class HostCall(Generic[AnswerT]):
    """A request to some hosts.

    Attributes:
        number: the id of the request.
        until: when all answers are due, by the time of the event loop; None for never.
        waiting: replicas of the hosts that have not answered.
        answers: the answers or errors that have arrived, each with the host's replica.
    """

    def __init__(
        self, number: int, request: Request[AnswerT], replicas: Iterable[int], timeout: float | None = None
    ) -> None:
        self.number = number
        self.until = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self.waiting = set(replicas)
        self.answers: asyncio.Queue[tuple[int, AnswerT | HostError]] = asyncio.Queue()
        self._answer_type = request.answer_type()

    async def next(self) -> tuple[int, AnswerT | HostError]:
        """Return the next answer or error, with the host's replica.

        Raises:
            asyncio.TimeoutError: it has not arrived in time.
        """
        left = None if self.until is None else self.until - asyncio.get_running_loop().time()
        return await asyncio.wait_for(self.answers.get(), left)

    def put(self, replica: int, answer: AnswerT | HostError) -> None:
        """Add the answer of a host, unless it has answered before."""
        if replica in self.waiting:
            self.waiting.discard(replica)
            self.answers.put_nowait((replica, answer))

    def receive(self, replica: int, message: messages.Message) -> None:
        """Add the answer in the message of a host."""
        answer: AnswerT | HostError
        try:
            if "error" in message:
                answer = HostError(str(message["error"])[:1000])
            elif "refused" in message:
                answer = decode(HostRefused, message["refused"], "the refusal")
            else:
                answer = decode(self._answer_type, message.get("answer"), "the answer")
        except ValueError as error:
            answer = HostError(str(error)[:1000])
        self.put(replica, answer)


class HostRequests:
    """Send requests to hosts, on the leader."""

    def __init__(self, writers: Mapping[int, asyncio.StreamWriter]) -> None:
        self._writers = writers
        self._numbers = itertools.count()
        self._calls: dict[int, HostCall[Any]] = {}

    def reaches(self, replica: int) -> bool:
        """Return whether a host other than this one is connected."""
        return replica in self._writers

    def begin(
        self, request: Request[AnswerT], replicas: Iterable[int], local: int, timeout: float | None = None
    ) -> HostCall[AnswerT]:
        """Send a request to hosts, and do not wait: a host that reads slowly delays no other.

        Args:
            local: the one of them that is not sent the request, because it is this process.
        """
        call = HostCall(next(self._numbers), request, replicas, timeout)
        fields = {"name": type(request).__name__, "fields": request}
        data = messages.encode({"type": "request", "id": call.number, **fields})
        self._calls[call.number] = call
        for replica in call.waiting - {local}:
            if replica in self._writers:
                self._writers[replica].write(data)
            else:
                call.put(replica, HostError(f"host {replica} is not connected"))
        return call

    def end(self, call: HostCall[Any]) -> None:
        """Cancel a request on the hosts that have not answered it."""
        del self._calls[call.number]
        data = messages.encode({"type": "cancel", "id": call.number})
        for replica in call.waiting & self._writers.keys():
            self._writers[replica].write(data)

    def receive(self, replica: int, message: messages.Message) -> None:
        """Pass on the answer of a host to the call that waits for it, if one still does."""
        number = message.get("id")
        if isinstance(number, int) and number in self._calls:
            self._calls[number].receive(replica, message)

    def drop(self, replica: int) -> None:
        """Have no call wait for a host whose connection has ended."""
        for call in self._calls.values():
            call.put(replica, HostError(f"the connection of host {replica} has ended"))


class HostResponder:
    """Execute the requests of the leader, on every other host."""

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
        answer = {"type": "answer", "id": number}
        try:
            try:
                data = messages.encode({**answer, "answer": await self._handler(decode_request(message))})
            except HostRefused as refusal:
                data = messages.encode({**answer, "refused": refusal})
        except (ValueError, messages.ProtocolError) as error:
            data = messages.encode({**answer, "error": str(error)[:1000]})
        await messages.send_bytes(self._writer, data)
