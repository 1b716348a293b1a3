# SPDX-License-Identifier: BSD-3-Clause
"""Manage the TCPStore of an attempt, or the port reserved for it."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable

from torchx_monarch.host.ranks.master_endpoint import MasterEndpoint
from torchx_monarch.host.ranks.store_process import StoreProcess, bound

_PORT_TIMEOUT = 5.0
"""Seconds to wait for the user's port while the store of an attempt or a run that is ending still has it."""


class MasterStore:
    """Open the master endpoint of each attempt on the host of replica 0.

    Args:
        say: called with a progress line when a store's process ends before it is closed.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._current: StoreProcess | None = None
        self._reserved: socket.socket | None = None

    async def open(self, endpoint: MasterEndpoint, serves: bool) -> tuple[int, bool]:
        """Open the port of an attempt and close the port of the attempt before.

        A fork of the zygote serves a TCPStore there, which begins with the ranks (``RankStarter.start``). The port is
        opened before its number is published, so that no other process can take it, and early connections wait.
        Without a store a socket that never listens reserves the port; both it and the program's own store set
        SO_REUSEADDR, so that the store can still bind the port.

        Args:
            endpoint: the endpoint; its port is 0 unless the user has given one.
            serves: whether there is a zygote that can serve a store.

        Returns:
            the port, and whether a store is served there.

        Raises:
            EndpointError: the endpoint cannot be opened.
        """
        self.end()
        until = time.monotonic() + _PORT_TIMEOUT
        while True:
            try:
                return self._open(endpoint, serves)
            except OSError as error:
                if not endpoint.port or error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise endpoint.refusal(error) from None
            await asyncio.sleep(0.1)

    def _open(self, endpoint: MasterEndpoint, serves: bool) -> tuple[int, bool]:
        if serves:
            self._current = StoreProcess(endpoint.bind, endpoint.port, self._say)
            return self._current.port, True
        self.release()
        self._reserved = bound(endpoint.bind if endpoint.port or endpoint.option else "", endpoint.port, reuse=True)
        return int(self._reserved.getsockname()[1]), False

    @property
    def port(self) -> int | None:
        """Port of the store that is served now; None while no store is served."""
        return self._current.port if self._current is not None else None

    @property
    def pids(self) -> list[int]:
        """Process id of the store; empty while no store is served."""
        return [self._current.pid] if self._current is not None and self._current.pid else []

    @property
    def waiting(self) -> list[StoreProcess]:
        """The store whose port is open and whose process has not begun; empty if there is none."""
        return [self._current] if self._current is not None and not self._current.pid else []

    def end(self) -> None:
        """Close the store that is served now."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def release(self) -> None:
        """Release the port that is reserved for the program's own store."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
