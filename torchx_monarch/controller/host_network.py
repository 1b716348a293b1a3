# SPDX-License-Identifier: BSD-3-Clause
"""The network connections of one host, and their protection.

The scheme of the rendezvous address decides. With ``unix`` all hosts are on one machine, and nothing listens on a
network. With ``tls`` all connections use mutual TLS, with a certificate that this host signs for itself. With
``insecure-tcp`` none is protected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterable

from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.address import REPLICA0_NAME, as_ipv6
from torchx_monarch.transport.connections import Address, ConnectError, Identity

_CHECKS_AT_A_TIME = 64


@dataclasses.dataclass(frozen=True)
class HostNetwork:
    """The network connections of this host.

    Attributes:
        rendezvous: address on which replica 0 listens.
        advertised: name or IP address by which other hosts dial this one; ``127.0.0.1`` on one machine.
        bind: local IP address on which ports are opened; empty for all.
        identity: this host's certificate; None without TLS.
    """

    rendezvous: Address
    options: HostSpec = HostSpec()
    advertised: str = "127.0.0.1"
    bind: str = ""
    identity: Identity | None = None

    @classmethod
    def setup(
        cls, rendezvous: Address, advertised: str, options: HostSpec, credentials: str, folder: str
    ) -> HostNetwork:
        """Create the certificate, in a folder of mode 0700; ``credentials`` are those of ``env_names.CREDENTIALS``.

        Raises:
            CredentialsError: under TLS, the credentials are missing or invalid.
            ValueError: ``--bind`` names no address of this host.
        """
        if not rendezvous.networked:
            return cls(rendezvous, options, advertised, bind="127.0.0.1")
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
            names |= {REPLICA0_NAME} if options.replica == 0 else set()
            names |= set(filter(None, map(as_ipv6, names)))  # a client that attaches again, see ``attachment``
            identity = Identity.from_credentials(HostCredentials.load(credentials), names, folder)
        bind = local_addresses.address_of(options.bind)
        return cls(rendezvous, options, advertised, bind, identity)

    async def greet(
        self, address: Address, greeting: messages.Message
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to an address and send a greeting, to which the protocol's version is added.

        Raises:
            ConnectError: the connection or the TLS handshake failed; the message says why.
        """
        reader, writer = await connections.connect(address, self.identity, self.options.peer_timeout)
        await messages.send(writer, {**greeting, "version": messages.VERSION})
        return reader, writer

    async def why_unreachable(self, members: Iterable[tuple[Registration, str]]) -> str:
        """Return why a host's worker loop cannot be reached or, under TLS, does not prove the host's identity.

        Empty if all can. Monarch does not report a failed handshake: it times out after a minute, without a reason.
        """
        if not self.rendezvous.networked:
            return ""
        at_a_time = asyncio.Semaphore(_CHECKS_AT_A_TIME)

        async def check(host: Registration, url: str) -> str:
            where, _, port = url.partition("://")[2].rpartition(":")
            if not where or not port.isdecimal():
                return f"{host.name} says that it listens at {url!r}, which is no address and port"
            address = Address(self.rendezvous.scheme, where, int(port))
            async with at_a_time:
                try:
                    _, writer = await connections.connect(address, self.identity, self.options.peer_timeout)
                    writer.close()
                except ConnectError as error:
                    return f"{host.name} cannot be reached by replica 0: {error}"
            return ""

        return next(filter(None, await asyncio.gather(*(check(host, url) for host, url in members))), "")
