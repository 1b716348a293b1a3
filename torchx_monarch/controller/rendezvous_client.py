# SPDX-License-Identifier: BSD-3-Clause
"""The client of the rendezvous: the handshake with a replica 0, and the connection of every other host to it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable

from torchx_monarch.controller.host_messages import Handler, HostRefused, Report, decode_request
from torchx_monarch.controller.host_network import HostNetwork, RendezvousError
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import messages
from torchx_monarch.transport.channel import Channel, Reopened
from torchx_monarch.transport.connections import Address, ConnectError
from torchx_monarch.transport.lease import Leases

_ANSWER_TIMEOUT = 60.0
"""Seconds for replica 0 to answer a greeting: it may be busy with thousands of them."""

_RETRY_EVERY = 0.01
"""Seconds between the first two tries to reach replica 0; each further pause is a little longer."""

_MAX_RETRY_DELAY = 0.5


class PutOffError(ConnectError):
    """Replica 0 answers that a greeting can be granted later."""


async def handshake(
    network: HostNetwork,
    address: Address,
    greeting: messages.Message,
    expected: str,
    timeout: float,
    on_failure: Callable[[ConnectError], None] = lambda error: None,
) -> tuple[messages.Message, asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a replica 0 and greet it. Retry until it listens and sends the expected answer.

    Raises:
        RendezvousError: it refused the greeting, or no try within ``timeout`` seconds had the expected answer.
    """
    started = time.monotonic()
    pause, why = _RETRY_EVERY, ""
    while time.monotonic() < started + timeout:
        try:
            reader, writer = await network.greet(address, greeting)
            try:
                answer = await messages.receive(reader, _ANSWER_TIMEOUT)
            except (messages.ProtocolError, TimeoutError) as error:
                writer.close()
                what = "what listens there is another program: " if isinstance(error, messages.ProtocolError) else ""
                raise ConnectError(f"{address}: {what}{error}") from None
            if answer is not None and answer.get("type") == expected:
                return answer, reader, writer
            writer.close()
            if answer is not None:
                refusal = f"replica 0 refused this host: {answer.get('reason')}"
                if answer.get("later"):
                    raise PutOffError(refusal)
                if answer.get("taken"):
                    raise ConnectError(refusal, final=True)
                raise RendezvousError(refusal)
            # Another replica 0 may start. CPython before 3.14 drops the alert about a certificate.
            why = "it ends, has too many connections, or does not accept this host's certificate (compare the clocks)"
            raise ConnectError(f"{address}: it hung up: {why}")
        except ConnectError as error:
            why = str(error)
            on_failure(error)
            # Final or not: the replica 0 of an earlier job may still hold the port, and replica 0 may not have noticed
            # yet that the host which this one replaces is lost, for which it takes the lease at most.
            if error.final and time.monotonic() > started + network.options.lease:
                raise RendezvousError(why) from None
        await asyncio.sleep(pause)
        pause = min(pause * 1.2, _MAX_RETRY_DELAY)
    raise RendezvousError(f"replica 0 was not reached in {timeout:g} s: {why}")


async def open_channel(
    network: HostNetwork,
    address: Address,
    greeting: messages.Message,
    timeout: float,
    on_failure: Callable[[ConnectError], None] = lambda error: None,
) -> tuple[messages.Message, Channel]:
    """Register with a replica 0 (see ``handshake``); return its answer and the channel to it."""
    answer, reader, writer = await handshake(network, address, greeting, "registered", timeout, on_failure)

    async def reopen(received: int) -> Reopened | None:
        resume = {"type": "resume", "token": answer.get("token"), "received": received}
        try:
            return await handshake(network, address, resume, "resumed", math.inf)
        except RendezvousError:
            return None

    return answer, Channel(reader, writer, network.options, address.networked, reopen)


class RendezvousClient:
    """The channel of a host to replica 0, for every host but replica 0."""

    def __init__(self, channel: Channel, name: str, lease: float) -> None:
        self.lost = ""  # why replica 0 is lost
        self.dismissed = False  # whether the result is for this host alone, and the job goes on without it
        self._channel = channel
        self._name = name
        self._leases = Leases(lease, lambda: [channel], sends=True)

    @classmethod
    async def join(
        cls,
        network: HostNetwork,
        host: Registration,
        timeout: float,
        on_failure: Callable[[ConnectError], None] = lambda error: None,
    ) -> RendezvousClient:
        """Connect to replica 0 and register (see ``handshake``)."""
        shortened = dataclasses.replace(host, error=host.error[: messages.MAX_ERROR])
        greeting = {"type": "register", "host": shortened}
        answer, channel = await open_channel(network, network.rendezvous, greeting, timeout, on_failure)
        return cls(channel, str(answer.get("name"))[:200], network.options.lease)

    async def report(self, report: Report) -> None:
        await self._channel.send({"type": type(report).__name__, **vars(report)})

    async def result(self, handler: Handler) -> JobResult | None:
        """Wait for the result, execute requests and send heartbeats meanwhile; return None if replica 0 is lost."""
        executing: dict[int, asyncio.Task[None]] = {}

        def execute(number: int, message: messages.Message) -> None:
            task = executing[number] = asyncio.ensure_future(self._answer(handler, number, message))
            task.add_done_callback(lambda _: executing.pop(number))

        self._leases.start()
        try:
            while message := await self._channel.receive():
                number = message.get("id")
                if message.get("type") == "request" and isinstance(number, int):
                    execute(number, message)
                if message.get("type") == "cancel" and number in executing:
                    executing[number].cancel()
                if message.get("type") == "result":
                    self._channel.confirm()
                    self.dismissed = message.get("dismissed") is True
                    return decode(JobResult, message, "the result")
            self.lost = f"{self._name} {self._channel.loss}"
            if (pause := self._leases.own_pause) and self._channel.silence <= self._leases.seconds:
                self.lost = f"this host did not run for {pause:.0f} s, and {self._name} has given it up"
        except (messages.ProtocolError, DecodeError) as error:
            self.lost = f"{self._name} sent an invalid message: {error}"
        finally:
            for task in executing.values():  # replica 0 is lost, or does not need the answers
                task.cancel()
            self._leases.stop()
        return None

    async def _answer(self, handler: Handler, number: int, message: messages.Message) -> None:
        answer = {"type": "answer", "id": number}
        try:
            try:
                data = messages.encode({**answer, "answer": await handler(decode_request(message))})
            except HostRefused as refusal:
                data = messages.encode({**answer, "refused": refusal})
        except (ValueError, messages.ProtocolError) as error:
            data = messages.encode({**answer, "error": str(error)[:1000]})
        await self._channel.send_bytes(data)
