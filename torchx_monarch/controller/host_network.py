# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The network connections of one host: the rendezvous, Monarch's own traffic, and the protection of both.

The scheme of the rendezvous address decides. With ``unix`` all hosts are on one machine: Monarch uses socket files, and
nothing listens on a network. With ``tls`` both use mutual TLS, with a certificate that this host signs for itself. With
``insecure-tcp`` neither is protected.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Callable, Iterable

from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.registration import Registration
from torchx_monarch.monarch_adapter.worker_port import WorkerPort, new_service_id
from torchx_monarch.transport import connections, local_addresses
from torchx_monarch.transport.address import REPLICA0_NAME, as_ipv6
from torchx_monarch.transport.connections import Address, ConnectError, Identity
from torchx_monarch.transport.local_addresses import NetworkOptions

_CHECKS_AT_A_TIME = 64

_CHECK_TIMEOUT = 10.0
"""Seconds for the handshake when replica 0 checks a host, which is busy with importing torch at that time."""

_MONARCH_SCHEMES = {"tls": "tls", "insecure-tcp": "tcp"}


@dataclasses.dataclass(frozen=True)
class HostNetwork:
    """The network connections of this host.

    Attributes:
        rendezvous: address on which replica 0 listens.
        options: the user's network options.
        advertised: name or IP address by which other hosts dial this one; ``127.0.0.1`` on one machine.
        bind: local IP address on which ports are opened; empty for all.
        identity: this host's certificate; None without TLS.
        client_url: URL on which this process listens as Monarch's client.
        serve_address: service id of this host, and the URL on which its worker loop listens.
        worker_address: the address with which a controller or a client attaches to the worker loop.
        worker_port: where Monarch starts only when the first client connects: its port until then; else None.
        reserved: the port on which this host listens once it has taken over, and until then refuses connections; None
            if it never takes over, or all hosts are on one machine.
    """

    rendezvous: Address
    options: NetworkOptions
    advertised: str
    bind: str
    identity: Identity | None
    client_url: str
    serve_address: str
    worker_address: str
    worker_port: WorkerPort | None = None
    reserved: socket.socket | None = None

    @classmethod
    def setup(
        cls,
        rendezvous: Address,
        advertised: str,
        options: NetworkOptions,
        credentials: str,
        folder: str,
        first: bool = False,
        deferred: bool = False,
        hands_over: bool = False,
    ) -> HostNetwork:
        """Create the certificate and open the ports.

        Args:
            rendezvous: address on which replica 0 listens.
            advertised: the result of ``local_addresses.advertised``.
            options: the user's network options.
            credentials: value of ``env_names.CREDENTIALS``; empty if it is not set.
            folder: folder for sockets and keys; mode 0700.
            first: whether this is replica 0.
            deferred: whether Monarch starts only when the first client connects.
            hands_over: whether another host takes over when replica 0 is lost.

        Raises:
            CredentialsError: under TLS, the credentials are missing or invalid.
            NetworkError: no port can be opened.
            OSError: with ``deferred``, nothing can listen on the worker's port.
        """
        service = new_service_id()
        if not rendezvous.networked:
            client, worker = (f"ipc://{os.path.join(folder, name)}" for name in ("client", "worker"))
            worker = f"{service}@{worker}"
            worker_port = WorkerPort(worker) if deferred else None
            return cls(rendezvous, options, advertised, "127.0.0.1", None, client, worker, worker, worker_port)
        identity = None
        if rendezvous.scheme == "tls":
            from torchx_monarch.transport.credentials import CredentialsError, HostCredentials

            if not credentials:
                raise CredentialsError(
                    f"the hosts are to meet at {rendezvous}, and {CREDENTIALS} is not set: without the job's "
                    "credentials a host can neither prove itself nor know the others"
                )
            # All names by which others may dial this host: schedulers give out names, or addresses of any interface.
            names = {advertised, rendezvous.host, os.uname().nodename, *local_addresses.interfaces().values()}
            # Clients expect this name of the host that has taken over, too.
            names |= {REPLICA0_NAME} if first or hands_over else set()
            names |= set(filter(None, map(as_ipv6, names)))  # a client that attaches again, see ``attachment``
            identity = Identity.of(HostCredentials.load(credentials), names, folder)
        scheme = _MONARCH_SCHEMES[rendezvous.scheme]
        client_socket, worker_socket = local_addresses.bind_port(options), local_addresses.bind_port(options)
        port = worker_socket.getsockname()[1]
        client_url, serve_url = (
            f"{scheme}://{advertised}:fd{each.detach()}" for each in (client_socket, worker_socket)
        )
        serve_address, worker_address = f"{service}@{serve_url}", f"{service}@{scheme}://{advertised}:{port}"
        bind = local_addresses.address_of(options.bind)
        addresses, worker_port = (client_url, serve_address, worker_address), None
        if deferred:
            worker_port = WorkerPort(serve_address)
        reserved = local_addresses.reserve_port(rendezvous, options) if hands_over and not first else None
        return cls(rendezvous, options, advertised, bind, identity, *addresses, worker_port, reserved)

    @property
    def listener(self) -> Address | None:
        """Return the address at which this host listens once it has taken over; None as for ``reserved``."""
        if self.reserved is None:
            return None
        return Address(self.rendezvous.scheme, self.advertised, self.reserved.getsockname()[1])

    async def start_monarch(
        self,
        on_fault: Callable[[str], None],
        warn: Callable[[str], None],
        lease: float,
        on_shutdown: Callable[[], None] | None = None,
        outlives_client: bool = False,
    ) -> None:
        """Start Monarch's worker loop in this process; where it is deferred, wait for the first client before.

        See ``monarch_api.start_worker`` for the arguments. ``on_fault`` and ``on_shutdown`` are called from other
        threads, ``warn`` from the event loop.
        """
        loop = asyncio.get_running_loop()

        def warn_in_loop(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the host has ended meanwhile
                loop.call_soon_threadsafe(warn, text)

        def start() -> None:
            from torchx_monarch.monarch_adapter import monarch_api

            tls = self.identity.files if self.identity else None
            monarch_api.start_worker(
                self.client_url, self.serve_address, tls, on_fault, warn_in_loop, lease, on_shutdown, outlives_client
            )

        if self.worker_port is not None:
            await self.worker_port.client_connected()
        await loop.run_in_executor(None, start)

    async def unreachable(self, hosts: Iterable[Registration]) -> dict[int, str]:
        """Find the hosts whose Monarch port cannot be reached or, under TLS, does not prove the host's identity.

        Monarch itself does not report a failed handshake: it would time out after a minute, without a reason.

        Args:
            hosts: the hosts to check.

        Returns:
            The reason for each such host, by replica, in a text that names the host; empty if all can be reached.
        """
        if not self.rendezvous.networked or self.worker_port is not None:
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
                        address, self.identity, self.options.peer_timeout, _CHECK_TIMEOUT
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
