# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Let the ranks of this host attach to the hosts of their job, as Monarch clients (see ``client.this_job``).

A rank has no certificate of the job. It connects to a socket file of its host, which connects to the leader for it, and
passes on what that answers (``controller.mesh_clients``) after a line of its own: ``role``, and ``transport``, the
URL on which the rank is to listen. The rank is attached until one of the connections ends.
"""

from __future__ import annotations

import asyncio
import contextlib

from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.host.workload import Host
from torchx_monarch.monarch_adapter.worker_loop import SCHEMES
from torchx_monarch.transport import local_addresses, messages
from torchx_monarch.transport.connections import ConnectError

_PIECE = 1 << 16


class AttachRelay:
    """Serve the socket file to which the ranks of a host connect.

    Args:
        host: the host.
        network: its connections.
    """

    def __init__(self, host: Host, network: HostNetwork) -> None:
        self._host = host
        self._network = network
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen."""
        self._server = await asyncio.start_unix_server(self._serve, self._host.attach_socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        network = self._network
        transport = f"{SCHEMES[network.rendezvous.scheme]}://{network.advertised}:0"
        names = sorted({network.advertised, self._host.hostname, *local_addresses.interfaces().values()})
        try:
            here = {"transport": transport if network.rendezvous.networked else "", "role": self._host.options.role}
            await messages.send(writer, {"type": "here", **here})
            try:
                from_leader, to_leader = await self._host.connect({"type": "attach", "names": names})
            except (ConnectError, OSError) as error:
                await messages.send(writer, {"type": "refused", "reason": f"the leader is not reached: {error}"})
                return
            try:
                passing = asyncio.ensure_future(_pass_on(from_leader, writer))
                gone = asyncio.ensure_future(reader.read())
                await asyncio.wait([passing, gone], return_when=asyncio.FIRST_COMPLETED)
                passing.cancel()
                gone.cancel()
            finally:
                to_leader.close()
        finally:
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
