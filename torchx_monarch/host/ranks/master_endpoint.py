# SPDX-License-Identifier: BSD-3-Clause
"""The master endpoint of an attempt: MASTER_ADDR, MASTER_PORT, and the local address that the store listens on."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import ipaddress
import socket

from torchx_monarch.command.torchrun_options import TorchrunOptions


class EndpointError(ValueError):
    """Raised when the user's endpoint cannot be served; the message names the endpoint and the reason."""


@dataclasses.dataclass(frozen=True)
class MasterEndpoint:
    """Represent the endpoint at which the ranks of an attempt meet.

    Attributes:
        address: MASTER_ADDR.
        port: MASTER_PORT; 0 for any free port.
        bind: local address that the store listens on; empty for all.
        option: the user's option that names the address; empty without one.
        unused: the user's option whose address is not used because of several machines; empty otherwise.
    """

    address: str
    port: int
    bind: str
    option: str = ""
    unused: str = ""

    @classmethod
    async def of(cls, options: TorchrunOptions, bind: str, advertised: str, hosts: int) -> MasterEndpoint:
        """Derive the endpoint of a job from the options of its torchrun command.

        The user's port is always used. The user's address (``--master-addr`` or the endpoint of a static rendezvous,
        else ``--local-addr``) is used on one machine only; ranks of several machines meet on replica 0's machine, at
        the address that the other hosts have dialled.

        Args:
            options: options of the torchrun command.
            bind: local address of the store if the user has given no endpoint; empty for all.
            advertised: address by which every rank can reach this host.
            hosts: number of hosts that take part.

        Raises:
            EndpointError: the user's address cannot be resolved.
        """
        named, is_local = options.static_endpoint, _is_loopback(advertised)
        if named is not None:
            (address, port), option = named, f"--master-addr={named[0]}"
        elif options.local_addr:
            address, port, option = options.local_addr, 0, f"--local-addr={options.local_addr}"
        else:
            return cls(advertised, 0, bind)
        if not is_local and (hosts > 1 or named is None):
            unused = option if not _is_loopback(address) and address != advertised else ""
            return cls(advertised, port, bind, unused=unused)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(address, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise EndpointError(f"{option} cannot be resolved: {error.strerror}") from None
        resolved = sorted(found, key=lambda info: info[0] != socket.AF_INET)
        return cls(address, port, str(resolved[0][4][0]), option)

    def refusal(self, error: OSError) -> EndpointError:
        """Return the exception to raise when the endpoint cannot be opened because of ``error``."""
        if error.errno == errno.EADDRNOTAVAIL and self.option:
            what = f"{self.option} is no address of this host, where the ranks are to meet"
            return EndpointError(f"{what}. Leave it out, or name an address of the host of replica 0")
        if not self.port:
            return EndpointError(f"no port can be opened on {self.bind or 'any address'}: {error.strerror}")
        what = f"--master-port={self.port} cannot be opened on {self.bind or 'any address'}: {error.strerror}"
        return EndpointError(f"{what}. Choose another port, or leave it out for a free one")


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
