# SPDX-License-Identifier: BSD-3-Clause
"""Stop a set of replicas: let them end by themselves, send SIGTERM, send SIGKILL, and then call back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

from torchx_monarch.backends.core.state import HOST_EXTRA, SETTLE
from torchx_monarch.supervisor.replica import Replica
from torchx_monarch.system import processes


class Timers(Protocol):
    """An event loop that calls functions at a later time."""

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call the function when ``time.monotonic()`` reaches ``when``."""


class GracefulStop:
    """One graceful stop of a set of replicas.

    It calls ``then`` once, when none of its replicas is alive. ``drop`` makes it inert when another stop replaces it.
    """

    def __init__(
        self,
        timers: Timers,
        scope: Collection[Replica],
        then: Callable[[], None],
        *,
        grace: float,
        settling: Collection[Replica] = (),
    ) -> None:
        """Prepare the stop; ``begin`` starts it.

        Args:
            grace: seconds from SIGTERM to SIGKILL; 0 for SIGKILL without SIGTERM.
            settling: replicas that first get SETTLE seconds to end by themselves; no replica gets a signal before.
        """
        self.scope = scope
        self._timers = timers
        self._then = then
        self._grace = grace
        self._settling = settling
        self._with_host: list[Replica] = []
        self._signalled = False
        self._over = False

    def begin(self) -> None:
        """Start the stop. If no replica in scope is alive, call ``then``."""
        if self._waiting_to_settle():
            self._timers.at(time.monotonic() + SETTLE, self._signal)
        self.check()

    def _waiting_to_settle(self) -> bool:
        return any(replica.alive for replica in self._settling)

    def check(self) -> None:
        """Check which replicas are alive; the caller does this when a replica has ended."""
        if self._over:
            return
        if not any(replica.alive for replica in self.scope):
            self._over = True
            self._then()
        elif not self._waiting_to_settle():
            self._signal()

    def _signal(self) -> None:
        if self._signalled or self._over:
            return
        self._signalled = True
        if self._grace <= 0:
            self._kill(self.scope)
            return
        living = {replica.record.pid: replica for replica in self.scope if replica.alive}
        for pid, hosts in processes.hosts(pid for pid in living if pid is not None).items():
            living[pid].terminate(hosts)
            if hosts:
                self._with_host.append(living[pid])
        self._set_deadline()

    def _set_deadline(self) -> None:
        now = time.monotonic()
        self._timers.at(now + self._grace, lambda: self._kill([r for r in self.scope if r not in self._with_host]))
        self._timers.at(now + self._grace + HOST_EXTRA, lambda: self._kill(self.scope))

    def shorten(self, grace: float) -> None:
        """Shorten the stop: send SIGTERM now if it was not sent yet, and SIGKILL in ``grace`` seconds at the latest."""
        if grace <= 0:
            self._grace, self._signalled = 0.0, True
            self._kill(self.scope)
        elif not self._signalled:
            self._grace = min(self._grace, grace)
            self._signal()
        elif grace < self._grace:
            self._grace = grace
            self._set_deadline()

    def _kill(self, scope: Collection[Replica]) -> None:
        if not self._over:
            for replica in scope:
                replica.kill()

    def drop(self) -> None:
        """Do nothing from now on."""
        self._over = True
