# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the connection of each host to the next one, with the job's certificates.

The hosts form a ring in the order of their replicas, so all links are measured at once and each host sends to one other
host and receives from one. A host listens on a port of its own for the host before it, whose greeting ``link`` it
answers with a message of type ``link``. Messages of type ``block``, with ``data`` of any length, follow, each of which
it answers with ``received``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from torchx_monarch.controller.host_comparison import SLOW_LATENCY, SLOW_RATE
from torchx_monarch.controller.host_messages import LinkOpened
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.model.host_facts import Link
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, ConnectError
from torchx_monarch.transport.listener import Listener

_TIMEOUT = 10.0
"""Seconds for a measurement, of which a slow link takes ``_AGAIN`` and one block."""

_OPEN_FOR = 30.0
"""Seconds after which the port is closed if the other host has not measured."""

_PINGS = 10

_BLOCKS = (1 << 16, 1 << 18, 1 << 20, 1 << 21)
"""Bytes of the blocks, as long as the link is fast enough for a larger one."""

_ENOUGH = 0.1
"""Seconds for a block after which no larger one is sent."""

_AGAIN = 2.0
"""Seconds for which a link that seems slow is measured again: a busy CPU delays single messages, not all of them."""


class LinkServer:
    """Answer the host that measures its connection to this one, on a port that is open for one measurement.

    Args:
        network: connections of this host.
        replica: replica of this host.
    """

    def __init__(self, network: HostNetwork, replica: int) -> None:
        self._network = network
        self._replica = replica
        self._listener: Listener | None = None

    def open(self) -> LinkOpened:
        """Open the port. Return where it is, or why there is none."""
        self.close()
        try:
            listening = local_addresses.bind_port(self._network.options)
        except local_addresses.NetworkError as error:
            return LinkOpened(self._replica, problem=str(error))
        listening.listen()
        identity = self._network.identity
        context = identity.context(server=True) if identity else None
        self._listener = Listener(listening, self._serve, context, messages.MAX_LINE)
        asyncio.get_running_loop().call_later(_OPEN_FOR, self._listener.close)
        return LinkOpened(self._replica, self._network.advertised, listening.getsockname()[1])

    def close(self) -> None:
        """Close the port; a measurement that has begun goes on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await messages.receive(reader, _TIMEOUT)
        if greeting is None or greeting.get("type") != "link" or connections.is_client(writer):
            return
        if self._listener is not None:
            self._listener.mark_authenticated()
        self.close()
        await messages.send(writer, {"type": "link"})
        until = time.monotonic() + _TIMEOUT
        while time.monotonic() < until:
            message = await messages.receive(reader, _TIMEOUT)
            if message is None or message.get("type") != "block":
                return
            await messages.send(writer, {"type": "received"})


async def measure(network: HostNetwork, replica: int, ports: Sequence[LinkOpened]) -> Link | None:
    """Measure the connection of this host to the next one.

    Args:
        network: connections of this host.
        replica: replica of this host.
        ports: where the hosts listen, this one among them, in the order of the ring.

    Returns:
        The measurement; None if there is no other host.
    """
    order = [port.replica for port in ports]
    if replica not in order or len(order) < 2:
        return None
    port = ports[(order.index(replica) + 1) % len(ports)]
    if port.problem:
        return Link(port.replica, problem=port.problem)
    address = Address(network.rendezvous.scheme, port.host, port.port)
    try:
        latency, rate = await asyncio.wait_for(_measure(network, address), _TIMEOUT)
        return Link(port.replica, latency, rate)
    except (asyncio.TimeoutError, TimeoutError):
        return Link(port.replica, problem="it has not received a block in time")
    except (ConnectError, messages.ProtocolError, OSError) as error:
        return Link(port.replica, problem=str(error))


async def _measure(network: HostNetwork, address: Address) -> tuple[float, float]:
    """Return the shortest time of a message and its answer, in seconds, and the bytes per second of a block.

    Raises:
        ConnectError: there is no connection, or it is closed.
    """
    reader, writer = await connections.connect(address, network.identity, network.options.peer_timeout)
    try:
        await messages.send(writer, {"type": "link", "version": messages.VERSION})
        if await messages.receive(reader) is None:
            raise ConnectError(f"{address}: the connection was closed")
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
        return latency, rate
    finally:
        writer.close()


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> float:
    """Send a block; return the seconds until the other host has confirmed it.

    Raises:
        ConnectError: the connection is closed.
    """
    began = time.monotonic()
    await messages.send(writer, {"type": "block", "data": "x" * size})
    if await messages.receive(reader) is None:
        raise ConnectError("the connection was closed")
    return time.monotonic() - began
