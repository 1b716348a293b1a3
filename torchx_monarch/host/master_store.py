# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Manage the TCPStore of an attempt, or the port reserved for it."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable

from torchx_monarch.host.master_endpoint import MasterEndpoint
from torchx_monarch.host.store_process import StoreProcess, bound
from torchx_monarch.host.zygote import Zygote

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

    async def open(self, endpoint: MasterEndpoint, zygote: Zygote | None) -> tuple[int, bool]:
        """Open the port of an attempt and close the port of the attempt before.

        A fork of the zygote serves a TCPStore there. The port is bound before its number is published, so that no
        other process can take it. Without a zygote a socket that never listens reserves the port; both it and
        the program's own store set SO_REUSEADDR, so that the store can still bind the port.

        Args:
            endpoint: the endpoint; its port is 0 unless the user has given one.
            zygote: a zygote that imports torch; None to serve no store.

        Returns:
            the port, and whether a store is already served there.

        Raises:
            EndpointError: the endpoint cannot be opened.
            ZygoteError: the zygote has ended or does not answer.
        """
        self.end()
        until = time.monotonic() + _PORT_TIMEOUT
        while True:
            try:
                return await self._open(endpoint, zygote)
            except OSError as error:
                if not endpoint.port or error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise endpoint.refusal(error) from None
            await asyncio.sleep(0.1)

    async def _open(self, endpoint: MasterEndpoint, zygote: Zygote | None) -> tuple[int, bool]:
        if zygote is not None:
            self._current = await StoreProcess.start(zygote, endpoint.bind, self._say, endpoint.port)
        if self._current is not None:
            return self._current.port, True
        self.release()
        self._reserved = bound(endpoint.bind if endpoint.port else "", endpoint.port, reuse=True)
        return int(self._reserved.getsockname()[1]), False

    @property
    def port(self) -> int | None:
        """Port of the store that is served now; None while no store is served."""
        return self._current.port if self._current is not None else None

    @property
    def pids(self) -> list[int]:
        """Process id of the store; empty while no store is served."""
        return [self._current.pid] if self._current is not None else []

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
