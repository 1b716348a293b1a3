# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How one host is connected to the others: the rendezvous, Monarch's own traffic, and what protects both.

The scheme of the rendezvous decides it all. ``unix`` is one machine: Monarch runs over socket files, and nothing
listens on any network. ``tls`` is mutual TLS on both, with a certificate that this host makes for itself.
``insecure-tcp`` is what it says.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections.abc import Callable, Iterable

from torchx_monarch.controller.rendezvous import Registration
from torchx_monarch.transport import connections, local_addresses
from torchx_monarch.transport.address import REPLICA0_NAME
from torchx_monarch.transport.connections import Address, ConnectError, Identity
from torchx_monarch.transport.local_addresses import NetworkOptions

_CHECKS_AT_A_TIME = 64

_CHECK_PATIENCE = 10.0
"""Seconds that a host has for the handshake when it is checked; it is busy with importing torch at that time."""

_MONARCH_SCHEMES = {"tls": "tls", "insecure-tcp": "tcp"}


@dataclasses.dataclass(frozen=True)
class HostNetwork:
    """The connections of this host.

    Attributes:
        rendezvous: where replica 0 listens.
        options: the user's.
        advertised: name or address by which other hosts dial this one; ``127.0.0.1`` on one machine.
        bind: local address that ports are opened on; empty for all.
        identity: ours, under TLS.
        client_url: where this process listens as Monarch's client.
        serve_url: where its worker loop listens.
        dial_url: how others reach that.
    """

    rendezvous: Address
    options: NetworkOptions
    advertised: str
    bind: str
    identity: Identity | None
    client_url: str
    serve_url: str
    dial_url: str

    @classmethod
    def setup(
        cls,
        rendezvous: Address,
        advertised: str,
        options: NetworkOptions,
        credentials: str,
        folder: str,
        first: bool = False,
    ) -> HostNetwork:
        """Make the certificate and open the ports.

        Args:
            rendezvous: where replica 0 listens.
            advertised: what ``network.advertised`` found.
            options: the user's.
            credentials: the value of ``credentials.VARIABLE``; empty where there is none.
            folder: for sockets and keys; of mode 0700.
            first: whether this is replica 0.

        Raises:
            CredentialsError: TLS without credentials, or with something else in their place.
            NetworkError: no port can be opened.
        """
        if not rendezvous.networked:
            client, worker = (f"ipc://{os.path.join(folder, name)}" for name in ("client", "worker"))
            return cls(rendezvous, options, advertised, "127.0.0.1", None, client, worker, worker)
        identity = None
        if rendezvous.scheme == "tls":
            from torchx_monarch.transport.credentials import VARIABLE, CredentialsError, HostCredentials

            if not credentials:
                raise CredentialsError(
                    f"the hosts are to meet at {rendezvous}, and {VARIABLE} is not set: without the job's credentials "
                    "a host can neither prove itself nor know the others"
                )
            # All that others may dial it by: schedulers hand out names, addresses of either network, or both.
            names = {advertised, rendezvous.host, os.uname().nodename, *local_addresses.interfaces().values()}
            names |= {REPLICA0_NAME} if first else set()
            identity = Identity.of(HostCredentials.load(credentials), names, folder)
        scheme = _MONARCH_SCHEMES[rendezvous.scheme]
        client_socket, worker_socket = local_addresses.bound(options), local_addresses.bound(options)
        port = worker_socket.getsockname()[1]
        client_url, serve_url = (
            f"{scheme}://{advertised}:fd{each.detach()}" for each in (client_socket, worker_socket)
        )
        dial_url = f"{scheme}://{advertised}:{port}"
        bind = local_addresses.address_of(options.bind)
        return cls(rendezvous, options, advertised, bind, identity, client_url, serve_url, dial_url)

    async def start_monarch(
        self,
        on_fault: Callable[[str], None],
        warn: Callable[[str], None],
        lease: float,
        on_shutdown: Callable[[], None] | None = None,
    ) -> str:
        """Start Monarch's worker loop in this process; its address. (See ``monarch_api.start_worker``.)"""

        def start() -> str:
            from torchx_monarch.monarch_adapter import monarch_api

            tls = self.identity.files if self.identity else None
            return monarch_api.start_worker(
                self.client_url, self.serve_url, self.dial_url, tls, on_fault, warn, lease, on_shutdown
            )

        return await asyncio.get_running_loop().run_in_executor(None, start)

    async def unreachable(self, hosts: Iterable[Registration]) -> dict[int, str]:
        """Find the hosts whose Monarch port cannot be reached, or under TLS does not prove who it is.

        Monarch itself says nothing of a handshake that fails: it would time out after a minute, without a reason.

        Returns:
            By replica, what is wrong, in words that name the host; empty where all can be reached.
        """
        if not self.rendezvous.networked:
            return {}
        scheme, at_a_time = _MONARCH_SCHEMES[self.rendezvous.scheme], asyncio.Semaphore(_CHECKS_AT_A_TIME)
        wrong: dict[int, str] = {}

        async def check(host: Registration) -> None:
            found = re.search(rf"@{scheme}://(.+):(\d+)$", host.address)
            if found is None:
                wrong[host.replica] = f"{host.name} has registered with {host.address!r}, which is no {scheme} address"
                return
            address = Address(self.rendezvous.scheme, found[1], int(found[2]))
            async with at_a_time:
                try:
                    _, writer = await connections.connect(
                        address, self.identity, self.options.peer_timeout, _CHECK_PATIENCE
                    )
                    writer.close()
                except ConnectError as error:
                    wrong[host.replica] = f"{host.name} cannot be reached by replica 0: {error}"

        checks = [asyncio.ensure_future(check(host)) for host in hosts]
        try:
            await asyncio.gather(*checks)
        finally:
            for one in checks:
                one.cancel()
        return wrong
