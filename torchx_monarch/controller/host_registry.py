# SPDX-License-Identifier: BSD-3-Clause
"""The hosts that are registered with replica 0, and those of them that are members of the present attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from torchx_monarch.model.host_facts import Registration


class HostRegistry:
    """The hosts of a role that are registered.

    Attributes:
        registered: their registrations, by replica.
        formed: whether an attempt has been formed.
    """

    def __init__(self, replicas: int) -> None:
        self.registered: dict[int, Registration] = {}
        self.formed = False
        self._replicas = replicas
        self._members: dict[int, Registration] = {}
        self._seen: set[int] = set()
        self._failed: set[int] = set()
        self._refused: set[int] = set()
        self._changed = asyncio.Event()

    def add(self, host: Registration) -> None:
        """Register a host."""
        self.registered[host.replica] = host
        (self._failed.add if host.error else self._failed.discard)(host.replica)
        self._seen.add(host.replica)
        self._note_change()

    def remove(self, replica: int) -> bool:
        """Forget a host; return whether it was registered. From here on its replacement may register."""
        removed = self.registered.pop(replica, None) is not None
        self._failed.discard(replica)
        if removed:
            self._note_change()
        return removed

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the registered hosts holds. It is evaluated at each change of these hosts."""
        while not condition():
            await self._changed.wait()

    def form(self, members: Iterable[Registration]) -> None:
        """Note the members of the next attempt."""
        self.formed = True
        self._members = {host.replica: host for host in members}

    def note_refused(self, replica: int) -> int:
        """Note a host that cannot start; return the number of replicas whose host could not."""
        self._seen.add(replica)
        self._refused.add(replica)
        return len(self._refused)

    def is_idle(self, host: Registration) -> bool:
        """Return whether a host is no member of the present attempt."""
        return self.formed and self._members.get(host.replica) is not host

    @property
    def able(self) -> list[Registration]:
        """The registered hosts that can take part, by replica."""
        return [host for _, host in sorted(self.registered.items()) if not host.error]

    @property
    def missing(self) -> list[int]:
        """The replicas that are not registered."""
        return [replica for replica in range(self._replicas) if replica not in self.registered]

    @property
    def present(self) -> int:
        """The number of registered hosts that can take part. Conditions ask at each change: no sum."""
        return len(self.registered) - len(self._failed)

    @property
    def expected(self) -> bool:
        """Whether some replicas have never registered, and may still do so."""
        return len(self._seen) < self._replicas

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
