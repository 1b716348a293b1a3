# SPDX-License-Identifier: BSD-3-Clause
"""Stop a set of replicas: send SIGTERM, and SIGKILL after the grace period."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.supervisor.replica import Replica
from torchx_monarch.system import processes


class GracefulStop:
    """One graceful stop of a set of replicas, which begins at once.

    Args:
        call_at: calls a function when ``time.monotonic()`` reaches a time.
        grace: seconds from SIGTERM to SIGKILL; 0 for SIGKILL without SIGTERM.
    """

    def __init__(
        self, call_at: Callable[[float, Callable[[], None]], None], replicas: Collection[Replica], grace: float
    ) -> None:
        self._call_at = call_at
        self._replicas = replicas
        self._grace = grace
        self._with_host: list[Replica] = []
        if grace <= 0:
            self._kill(replicas)
            return
        living = {replica.record.pid: replica for replica in replicas if replica.alive}
        for pid, hosts in processes.hosts(pid for pid in living if pid is not None).items():
            living[pid].terminate(hosts)
            if hosts:
                self._with_host.append(living[pid])
        self._set_deadline()

    def shorten(self, grace: float) -> None:
        """Send SIGKILL in ``grace`` seconds at the latest; do nothing if it is to be sent earlier."""
        if grace >= self._grace:
            return
        self._grace = grace
        if grace <= 0:
            self._kill(self._replicas)
        else:
            self._set_deadline()

    def _set_deadline(self) -> None:
        now = time.monotonic()
        without_host = [replica for replica in self._replicas if replica not in self._with_host]
        self._call_at(now + self._grace, lambda: self._kill(without_host))
        self._call_at(now + self._grace + HOST_EXTRA, lambda: self._kill(self._replicas))

    def _kill(self, replicas: Collection[Replica]) -> None:
        for replica in replicas:
            replica.kill()
