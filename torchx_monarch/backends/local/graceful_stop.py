# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ending a set of replicas: let them end by themselves, ask them (SIGTERM), end them (SIGKILL), and then go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

from torchx_monarch.backends.local.replica import Replica
from torchx_monarch.system import processes

#: Seconds that the siblings of a failed replica get to end by themselves: they usually carry the verdict out.
SETTLE = 5.0
#: Seconds that a host gets beyond the grace: within the grace it ends its own ranks.
HOST_EXTRA = 5.0


class Timers(Protocol):
    """What calls back later."""

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at ``time.monotonic() == when``."""


class GracefulStop:
    """One such ending.

    It calls ``then`` once, when none of its replicas lives. ``drop`` makes it inert: another one has taken over.
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
        """Nothing happens before ``begin``.

        Args:
            scope: the replicas to end.
            grace: seconds from SIGTERM to SIGKILL; with 0 there is no SIGTERM.
            settling: replicas that first get SETTLE seconds to end by themselves; nobody is told to end before.
        """
        self.scope = scope
        self._timers = timers
        self._then = then
        self._grace = grace
        self._settling = settling
        self._with_host: list[Replica] = []
        self._told = False
        self._over = False

    def begin(self) -> None:
        """Start ending them. When none of them lives, this calls ``then``."""
        if self._waiting_to_settle():
            self._timers.at(time.monotonic() + SETTLE, self._tell)
        self.check()

    def _waiting_to_settle(self) -> bool:
        return any(replica.alive for replica in self._settling)

    def check(self) -> None:
        """Look again; to be called when a replica has ended."""
        if self._over:
            return
        if not any(replica.alive for replica in self.scope):
            self._over = True
            self._then()
        elif not self._waiting_to_settle():
            self._tell()

    def _tell(self) -> None:
        if self._told or self._over:
            return
        self._told = True
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

    def hurry(self, grace: float) -> None:
        """End it sooner: SIGTERM now if that is still to come, SIGKILL in ``grace`` seconds at the latest."""
        if grace <= 0:
            self._grace, self._told = 0.0, True
            self._kill(self.scope)
        elif not self._told:
            self._grace = min(self._grace, grace)
            self._tell()
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
