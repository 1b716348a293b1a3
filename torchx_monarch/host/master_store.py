# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Manage the TCPStore of an attempt, or the port reserved for it, and start the store of the next attempt early."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable

from torchx_monarch.host.master_endpoint import MasterEndpoint
from torchx_monarch.host.rank_process import RankProcess
from torchx_monarch.host.store_process import StoreProcess, bound

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
        self._next_store: asyncio.Task[StoreProcess | None] | None = None
        self._reserved: socket.socket | None = None
        self._next_bind: str | None = None  # address for a store that is started early; None to start none

    async def open(self, endpoint: MasterEndpoint, interpreter: RankProcess | None) -> tuple[int, bool]:
        """Open the port of an attempt and close the port of the attempt before.

        A fork of the interpreter serves a TCPStore there. The port is bound before its number is published, so that no
        other process can take it. Without an interpreter a socket that never listens reserves the port; both it and
        the program's own store set SO_REUSEADDR, so that the store can still bind the port.

        Args:
            endpoint: the endpoint; its port is 0 unless the user has given one.
            interpreter: an interpreter that imports torch and has no program yet; None to serve no store.

        Returns:
            the port, and whether a store is already served there.

        Raises:
            EndpointError: the endpoint cannot be opened.
        """
        self.end()
        until = time.monotonic() + _PORT_TIMEOUT
        while True:
            try:
                return await self._open(endpoint, interpreter)
            except OSError as error:
                if not endpoint.port or error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise endpoint.refusal(error) from None
            await asyncio.sleep(0.1)

    async def _open(self, endpoint: MasterEndpoint, interpreter: RankProcess | None) -> tuple[int, bool]:
        self._current = await self._serve(endpoint, interpreter) if interpreter is not None else None
        if self._current is not None:
            self._next_bind = None if endpoint.port else endpoint.bind
            return self._current.port, True
        self.release()
        self._reserved = bound(endpoint.bind if endpoint.port else "", endpoint.port, reuse=True)
        return int(self._reserved.getsockname()[1]), False

    async def _serve(self, endpoint: MasterEndpoint, interpreter: RankProcess) -> StoreProcess | None:
        ahead, self._next_store = self._next_store, None
        store = await ahead if ahead is not None else None
        if store is not None and store.address == endpoint.bind and not endpoint.port and not store.ended:
            return store
        if store is not None:
            store.close()
        return await StoreProcess.start(interpreter, endpoint.bind, self._say, endpoint.port)

    @property
    def port(self) -> int | None:
        """Port of the store that is served now; None while no store is served."""
        return self._current.port if self._current is not None else None

    @property
    def pids(self) -> list[int]:
        """Process ids of the stores of this attempt and of the next."""
        ahead = self._next_store.result() if self._next_store is not None and self._next_store.done() else None
        return [store.pid for store in (self._current, ahead) if store is not None]

    async def settled(self) -> None:
        """Wait until the store of the next attempt has a process, if it is being started."""
        if self._next_store is not None:
            await asyncio.wait([self._next_store])

    def start_ahead(self, interpreter: RankProcess) -> None:
        """Start the next attempt's store, if the last attempt was served a store and the user has given no port.

        Args:
            interpreter: an interpreter that waits for the next attempt; forked once it has imported torch.
        """
        if self._next_bind is not None and self._next_store is None:
            self._next_store = asyncio.ensure_future(StoreProcess.start(interpreter, self._next_bind, self._say))

    def take_over(self, before: MasterStore, keep: bool) -> None:
        """Take over the next attempt's store from another ``MasterStore``.

        Args:
            before: the other one, which must not open a port any more.
            keep: whether the store may be used; it is closed otherwise.
        """
        ahead, before._next_store = before._next_store, None
        if keep:
            self._next_store = ahead
        elif ahead is not None:
            ahead.add_done_callback(_close)

    def end(self) -> None:
        """Close the store that is served now."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def move_away(self) -> None:
        """Close the store that is served now and start no other: the ranks meet on another host."""
        self.end()
        self._next_bind = None

    def release(self) -> None:
        """Release the port that is reserved for the program's own store."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def _close(store: asyncio.Task[StoreProcess | None]) -> None:
    if not store.cancelled() and store.exception() is None and (process := store.result()) is not None:
        process.close()
