# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the connection of a host to replica 0: the greeting ``link``, over the job's own port and certificates.

The answer is a message of type ``link``. Then the host sends messages of type ``block``, with ``data`` of any length,
and replica 0 answers each with ``received``. One host is served at a time, so that hosts do not slow each other.
"""

from __future__ import annotations

import asyncio
import time

from torchx_monarch.controller.host_comparison import SLOW_LATENCY, SLOW_RATE
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.model.host_facts import Link
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import ConnectError

_TIMEOUT = 10.0

_PINGS = 10

_BLOCKS = (1 << 16, 1 << 18, 1 << 20, 1 << 21)
"""Bytes of the blocks, as long as the link is fast enough for a larger one."""

_ENOUGH = 0.1
"""Seconds for a block after which no larger one is sent."""

_AGAIN = 2.0
"""Seconds for which a link that seems slow is measured again: a busy CPU delays single messages, not all of them."""

_MOST_MESSAGES = 1000
"""Messages that replica 0 answers one host; a host whose link is slow sends far fewer within these seconds."""


class LinkTest:
    """Answer the hosts that measure their connection, on replica 0."""

    def __init__(self) -> None:
        self._busy = asyncio.Lock()

    async def serve(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer a greeting (see ``Rendezvous.clients``)."""
        async with self._busy:
            await messages.send(writer, {"type": "link"})
            for _ in range(_MOST_MESSAGES):
                message = await messages.receive(reader, _TIMEOUT)
                if message is None or message.get("type") != "block":
                    return
                await messages.send(writer, {"type": "received"})


async def measure(network: HostNetwork, hosts: int) -> Link:
    """Measure the connection of this host to replica 0.

    Args:
        network: connections of this host.
        hosts: number of hosts that measure; each waits for the hosts before it.
    """
    try:
        return await asyncio.wait_for(_measure(network), _TIMEOUT * (1 + hosts / 10))
    except (asyncio.TimeoutError, TimeoutError):
        return Link(problem="replica 0 has not received a block in time")
    except (ConnectError, messages.ProtocolError, OSError) as error:
        return Link(problem=str(error))


async def _measure(network: HostNetwork) -> Link:
    address, peer_timeout = network.rendezvous, network.options.peer_timeout
    reader, writer = await connections.connect(address, network.identity, peer_timeout)
    try:
        await messages.send(writer, {"type": "link", "version": messages.VERSION})
        answer = await messages.receive(reader)
        if answer is None or answer.get("type") != "link":
            return Link(problem=f"replica 0 refuses: {(answer or {}).get('reason', 'the connection is closed')}")
        until = time.monotonic() + _AGAIN
        latency = min([await _send(reader, writer, 0) for _ in range(_PINGS)])
        while latency > SLOW_LATENCY and time.monotonic() < until:
            latency = min(latency, await _send(reader, writer, 0))
        rate = 0.0
        while rate < SLOW_RATE:
            for size in _BLOCKS:
                seconds = await _send(reader, writer, size)
                rate = max(rate, size / max(seconds - latency, 1e-6))
                if seconds > _ENOUGH:
                    break
            if time.monotonic() > until:
                break
        return Link(latency, rate)
    finally:
        writer.close()


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> float:
    """Send a block; return the seconds until replica 0 has confirmed it.

    Raises:
        ConnectError: the connection is closed.
    """
    began = time.monotonic()
    await messages.send(writer, {"type": "block", "data": "x" * size})
    if await messages.receive(reader) is None:
        raise ConnectError("the connection to replica 0 was closed")
    return time.monotonic() - began
