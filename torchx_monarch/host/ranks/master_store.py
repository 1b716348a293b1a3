# SPDX-License-Identifier: BSD-3-Clause
"""Where the ranks of an attempt meet: MASTER_ADDR, MASTER_PORT, and the TCPStore there, or the port reserved for it.

The store is served by a fork of the zygote, so that torch is imported once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable

from torchx_monarch.command.torchrun_options import TorchrunOptions
from torchx_monarch.model.job_result import describe_code
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system.children import Child

_PORT_TIMEOUT = 5.0
"""Seconds to wait for the user's port while the store of an attempt or a run that is ending still has it."""

_BACKLOG = 4096
"""Connections that wait at most until the process accepts them: ranks start at the same time as it does."""


@dataclasses.dataclass(frozen=True)
class MasterEndpoint:
    """The endpoint at which the ranks of an attempt meet.

    Attributes:
        port: 0 for any free port.
        bind: local address that the store listens on; empty for all.
        option: the user's option that names the address; empty without one.
    """

    address: str
    port: int
    bind: str
    option: str = ""

    @classmethod
    async def create(cls, options: TorchrunOptions, bind: str, advertised: str, hosts: int) -> MasterEndpoint:
        """Derive the endpoint of a job from the options of its torchrun command.

        The user's port is always used. The user's address (``--master-addr`` or the endpoint of a static rendezvous,
        else ``--local-addr``) is used on one machine only; ranks of several machines meet on replica 0's machine, at
        the address that the other hosts have dialled. Raises ``LaunchError`` if the user's cannot be resolved.
        """
        named, is_local = options.static_endpoint, _is_loopback(advertised)
        if named is not None:
            (address, port), option = named, f"--master-addr={named[0]}"
        elif options.local_addr:
            address, port, option = options.local_addr, 0, f"--local-addr={options.local_addr}"
        else:
            return cls(advertised, 0, bind)
        if not is_local and (hosts > 1 or named is None):
            return cls(advertised, port, bind)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(address, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LaunchError(f"{option} cannot be resolved: {error.strerror}") from None
        resolved = sorted(found, key=lambda info: info[0] != socket.AF_INET)
        return cls(address, port, str(resolved[0][4][0]), option)

    def refusal(self, error: OSError) -> LaunchError:
        if error.errno == errno.EADDRNOTAVAIL and self.option:
            what = f"{self.option} is no address of this host, where the ranks are to meet"
            return LaunchError(f"{what}. Leave it out, or name an address of the host of replica 0")
        if not self.port:
            return LaunchError(f"no port can be opened on {self.bind or 'any address'}: {error.strerror}")
        what = f"--master-port={self.port} cannot be opened on {self.bind or 'any address'}: {error.strerror}"
        return LaunchError(f"{what}. Choose another port, or leave it out for a free one")


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class MasterStore:
    """Open the master endpoint of each attempt on the host of replica 0; ``current`` is the present one's store."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.current: StoreProcess | None = None
        self._reserved: socket.socket | None = None

    async def open(self, endpoint: MasterEndpoint, serves: bool) -> tuple[int, bool]:
        """Open the port of an attempt and close the port of the attempt before.

        A fork of the zygote serves a TCPStore there, which begins with the ranks (``RankStarter.start``). The port is
        opened before its number is published, so that no other process can take it, and early connections wait.
        Without a store a socket that never listens reserves the port; both it and the program's own store set
        SO_REUSEADDR, so that the store can still bind the port. Returns whether a store is served, too.
        """
        self.close()
        until = time.monotonic() + _PORT_TIMEOUT
        while True:
            try:
                if serves:
                    self.current = StoreProcess(endpoint.bind, endpoint.port, self._say)
                    return self.current.port, True
                bind = endpoint.bind if endpoint.port or endpoint.option else ""
                self._reserved = _bound(bind, endpoint.port, reuse=True)
                return int(self._reserved.getsockname()[1]), False
            except OSError as error:
                if not endpoint.port or error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise endpoint.refusal(error) from None
            await asyncio.sleep(0.1)

    def close(self) -> None:
        """End the store, or release the port that is reserved for the program's own."""
        if self.current is not None:
            self.current.close()
        if self._reserved is not None:
            self._reserved.close()
        self.current = self._reserved = None


class StoreProcess(Child):
    """A process that serves a TCPStore. Its port, any free one for 0, is open before the process begins.

    The process runs until it is closed or the host ends: it reads a pipe of which only the host has the write end.

    Attributes:
        address: that on which it listens; empty for all.
        given: the read end of the pipe, and the socket of the port.
    """

    def __init__(self, address: str, port: int, say: Callable[[str], None]) -> None:
        super().__init__()
        self.address = address
        self._say = say
        with _bound(address, port, reuse=port != 0) as listener:
            listener.listen(_BACKLOG)
            self.port: int = listener.getsockname()[1]
            read_end, self._lifeline = os.pipe()
            self.given = read_end, listener.detach()
        self._closed = False

    def close(self) -> None:
        """Close the pipe, so that the process exits, and the port if the process has not begun."""
        if not self._closed:
            self._closed = True
            os.close(self._lifeline)
            self.close_given()

    def end(self, code: int) -> None:
        super().end(code)
        if not self._closed:
            how = describe_code(code)
            self._say(f"the process of the ranks' TCPStore (pid {self.pid}) {how}; ranks that need it will fail")


def _bound(address: str, port: int, reuse: bool) -> socket.socket:
    """Return a bound TCP socket that does not listen yet, so that no other process can take the port.

    ``reuse`` allows connections of an earlier listener on the port, and another bound socket that does not listen.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held
