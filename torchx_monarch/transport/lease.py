# SPDX-License-Identifier: BSD-3-Clause
"""Leases: how long a peer process may be silent before it counts as lost.

A lease detects a process that still exists but does nothing: stopped by SIGSTOP, or hung. The event loop sends and
answers the heartbeats that renew it. Only time in which the watching process has itself run counts: one that was
stopped or got no CPU for a minute must not blame its peers for the silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_HEARTBEATS = 3
"""Heartbeats per lease, so that two may be late. For four thousand hosts, one heartbeat every 5 s would cost replica 0
a tenth of a core, and one every 10 s costs half of that."""

_TICK = 1.0
"""Seconds between two checks of all leases."""

Peer = TypeVar("Peer")


class Leases(Generic[Peer]):
    """Watch the leases that one process grants to its peers.

    Args:
        seconds: seconds of silence that a peer may have, counted while this process runs.
        on_expired: called once with each peer whose lease has expired. The peer is no longer watched then.
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
        """Return the number of seconds between two heartbeats."""
        return self.seconds / _HEARTBEATS

    @property
    def own_pause(self) -> float:
        """Return for how many seconds this process did not run within the last lease; 0 if less than half a lease.

        A pause of half a lease can be enough for a peer to give this process up, because the peer received the last
        heartbeat some time before the pause.
        """
        self._note_pause(time.monotonic())
        return self._pause

    def start(self) -> None:
        """Start to watch the leases."""
        self._looked = time.monotonic()
        self._watching = asyncio.ensure_future(self._watch())

    def stop(self) -> None:
        """Stop watching the leases."""
        if self._watching is not None:
            self._watching.cancel()

    def renew(self, peer: Peer) -> None:
        """Renew the lease of a peer from which a message has arrived. The first call starts its lease."""
        self._silence[peer] = 0.0

    def drop(self, peer: Peer) -> None:
        """Stop watching a peer."""
        self._silence.pop(peer, None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            now = time.monotonic()
            self._note_pause(now)
            # Messages that arrived during a pause of this process are read before the next check.
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
