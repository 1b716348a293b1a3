# SPDX-License-Identifier: BSD-3-Clause
"""The hosts that are registered with replica 0, and those of them that are members of the present attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchx_monarch.model.host_facts import Registration


class HostRegistry:
    """The hosts of a role that are registered.

    Attributes:
        registered: their registrations, by replica.
        members: the members of the present attempt, in the order of their node ranks; empty before the first.
    """

    def __init__(self, replicas: int) -> None:
        self.registered: dict[int, Registration] = {}
        self.members: list[Registration] = []
        self._replicas = replicas
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

    @property
    def formed(self) -> bool:
        """Whether an attempt has been formed."""
        return bool(self.members)

    def note_refused(self, replica: int) -> int:
        """Note a host that cannot start; return the number of replicas whose host could not."""
        self._seen.add(replica)
        self._refused.add(replica)
        return len(self._refused)

    def is_idle(self, host: Registration) -> bool:
        """Return whether a host is no member of the present attempt."""
        return self.formed and not any(member is host for member in self.members)

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
