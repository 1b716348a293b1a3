# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Leases: how long the process at the other end of a connection may be silent until it counts as lost.

A process that has ended is noticed by its broken connection, and a machine that is gone by the transport's
``peer_timeout``. A lease finds the process that is still there and does nothing: stopped (SIGSTOP), or hung. Heartbeats
renew it; they are sent and answered by the event loop, so that only a process whose event loop runs is alive.

A busy machine must not look like a lost one. So a lease is long, and only time in which this process has run itself
counts: a process that was stopped, or got no CPU, for a minute has no reason to blame the others for their silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

LEASE = 30.0
"""Seconds of silence after which a process counts as lost, unless told otherwise."""

_HEARTBEATS = 3
"""Heartbeats in one lease: two may be late. Of four thousand hosts, one every 5 s would cost replica 0 a tenth of a
core; one every 10 s half of that."""

_TICK = 1.0
"""Seconds between two looks at all leases."""

Peer = TypeVar("Peer")


class Leases(Generic[Peer]):
    """The leases that one process gives to others.

    Args:
        seconds: of silence that are allowed, in time that this process has run.
        on_expired: called once with each peer whose lease has expired. It is then watched no more.
    """

    def __init__(self, seconds: float, on_expired: Callable[[Peer], None]) -> None:
        self.seconds = seconds
        self._on_expired = on_expired
        self._tick = min(_TICK, seconds / 10)
        self._silence: dict[Peer, float] = {}
        self._looked = time.monotonic()
        self._pause, self._pause_ended = 0.0, self._looked
        self._watching: asyncio.Task[None] | None = None

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats."""
        return self.seconds / _HEARTBEATS

    @property
    def own_pause(self) -> float:
        """Seconds for which this process has not run, within the last lease; 0 if too few for others to give it up.

        Half a lease may be enough: they have heard its last heartbeat some time before.
        """
        self._note_pause(time.monotonic())
        return self._pause

    def start(self) -> None:
        """Begin to watch."""
        self._looked = time.monotonic()
        self._watching = asyncio.ensure_future(self._watch())

    def stop(self) -> None:
        """Watch no more."""
        if self._watching is not None:
            self._watching.cancel()

    def renew(self, peer: Peer) -> None:
        """Note that a peer has been heard from; from the first time on it is watched."""
        self._silence[peer] = 0.0

    def drop(self, peer: Peer) -> None:
        """Watch a peer no more."""
        self._silence.pop(peer, None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            now = time.monotonic()
            self._note_pause(now)
            # Messages that arrived in a pause are read before the next look.
            passed, self._looked = min(now - self._looked, 2 * self._tick), now
            for peer, silence in list(self._silence.items()):
                self._silence[peer] = silence + passed
                if silence + passed > self.seconds:
                    del self._silence[peer]
                    self._on_expired(peer)

    def _note_pause(self, now: float) -> None:
        late = now - self._looked - self._tick
        if late >= self.seconds / 2:
            self._pause, self._pause_ended = late, now
        elif now > self._pause_ended + self.seconds:
            self._pause = 0.0
