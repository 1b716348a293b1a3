# SPDX-License-Identifier: BSD-3-Clause
"""Let the ranks of this host attach to the hosts of their job, as Monarch clients (see ``client.this_job``).

A rank has no certificate of the job. It connects to a socket file of its host and names a role, with an empty text for
its own. The host connects to the role's leader for it, and passes on what that answers (``controller.mesh_clients``)
after a line of its own, ``here``: the role of the rank, ``transport``, the URL on which the rank is to listen,
``others``, the further roles with meshes, and ``timeout``, the seconds for the role's hosts to be together. The rank is
attached until one of the connections ends.
"""

from __future__ import annotations

import asyncio
import contextlib

from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import RendezvousError
from torchx_monarch.controller.roles import is_registered_address
from torchx_monarch.host.host import Host
from torchx_monarch.host.ranks.breakpoints import Streams
from torchx_monarch.host.worker_loops import SCHEMES
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, ConnectError

_PIECE = 1 << 16

_RETRY_EVERY = 0.1
"""Seconds until the next try to connect to another role, which may still be starting."""


class AttachRelay:
    """Serve the socket file to which the ranks of a host connect."""

    def __init__(self, host: Host, network: HostNetwork) -> None:
        self._host = host
        self._network = network
        text = host.options.peers or host.environ.get("MONARCH_PEERS", "")
        self._others = dict(peer.split("=", 1) for peer in text.split(",") if peer)
        self._others.pop(host.options.role, None)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen."""
        self._server = await asyncio.start_unix_server(self._serve, self._host.attach_socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        network, options = self._network, self._host.options
        transport = f"{SCHEMES[network.rendezvous.scheme]}://{network.advertised}:0"
        names = sorted({network.advertised, self._host.hostname, *local_addresses.interfaces().values()})
        try:
            role = (await messages.receive(reader) or {}).get("role")
            here = {
                "role": options.role,
                "transport": transport if network.rendezvous.networked else "",
                "others": list(self._others),
                "timeout": options.host_timeout,
            }
            await messages.send(writer, {"type": "here", **here})
            try:
                from_leader, to_leader = await self._connect(str(role), {"type": "attach", "names": names})
            except (ConnectError, RendezvousError, OSError, ValueError) as error:
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
        except messages.ProtocolError as error:
            await messages.send(writer, {"type": "refused", "reason": str(error)})
        finally:
            writer.close()

    async def _connect(self, role: str, greeting: messages.Message) -> Streams:
        """Connect to the leader of a role and send a greeting."""
        if role in ("", self._host.options.role):
            return await self._host.connect(greeting)
        if role not in self._others:
            raise ConnectError(f"role {role!r} has no mesh here, but {', '.join(self._others) or 'no other role'}")
        loop, timeout = asyncio.get_running_loop(), self._host.options.host_timeout
        until = loop.time() + timeout
        while True:
            try:
                address = await self._address_of(role, until - loop.time())
                identity, peer_timeout = self._network.identity, self._host.options.peer_timeout
                return await connections.greet(address, greeting, identity, peer_timeout)
            except ConnectError as error:
                if loop.time() > until:
                    raise ConnectError(f"role {role}: {error}, after {timeout:g} s (--host-timeout)") from None
            await asyncio.sleep(_RETRY_EVERY)

    async def _address_of(self, role: str, timeout: float) -> Address:
        where, roles = self._others[role], self._host.roles
        if roles is not None and roles.server is not None and is_registered_address(where):
            return await roles.find(role, self._network, timeout)
        expanded = local_addresses.expand_address(where, self._host.environ, is_first=False)
        return Address.parse(expanded, f"role {role}")


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
