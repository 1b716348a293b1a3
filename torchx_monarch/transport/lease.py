# SPDX-License-Identifier: BSD-3-Clause
"""Leases: how long a peer process may be silent before it counts as lost.

A lease detects a process that still exists but does nothing: stopped by SIGSTOP, or hung. The event loop sends and
answers the heartbeats that renew it. Only time in which the watching process has itself run counts: one that was
stopped or got no CPU for a minute must not blame its peers for the silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from torchx_monarch.transport.channel import Channel

_HEARTBEATS = 3
"""Heartbeats per lease, so that two may be late. Each costs replica 0 about 0.03 ms of CPU time."""

_TICK = 1.0
"""Seconds between two checks of all leases."""


class Leases:
    """Watch the leases that one process grants to its peers.

    Args:
        seconds: seconds of silence that a peer may have, counted while this process runs.
        peers: returns the channels to those that are not lost.
        sends: whether this process sends heartbeats to them, which they answer.
    """

    def __init__(self, seconds: float, peers: Callable[[], Sequence[Channel]], sends: bool = False) -> None:
        self.seconds = seconds
        self._peers = peers
        self._sends = sends
        self._sent_at = time.monotonic()
        self._tick = min(_TICK, seconds / 10)
        self._checked_at = time.monotonic()
        self._pause, self._pause_ended = 0.0, self._checked_at
        self._watching: asyncio.Task[None] | None = None

    @property
    def own_pause(self) -> float:
        """Return for how many seconds this process did not run, if it runs again for less than a lease; else 0.

        Pauses of less than half a lease do not count. A longer one can be enough for a peer to give this process up,
        because the peer received the last heartbeat some time before the pause.
        """
        self._measure_pause(time.monotonic())
        return self._pause

    def start(self) -> None:
        self._checked_at = self._sent_at = time.monotonic()
        self._watching = asyncio.ensure_future(self._watch())

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            now = time.monotonic()
            self._measure_pause(now)
            # Messages that arrived during a pause of this process are read before the next check.
            passed, self._checked_at = min(now - self._checked_at, 2 * self._tick), now
            is_due = self._sends and now >= self._sent_at + self.seconds / _HEARTBEATS
            for peer in self._peers():
                peer.silence += passed
                if peer.silence > self.seconds:
                    peer.lease_expired()
                elif is_due:
                    peer.confirm(asks=True)
            self._sent_at = now if is_due else self._sent_at

    def _measure_pause(self, now: float) -> None:
        late = now - self._checked_at - self._tick
        if late >= self.seconds / 2:
            self._pause, self._pause_ended = late, now
        elif now > self._pause_ended + self.seconds:
            self._pause = 0.0
