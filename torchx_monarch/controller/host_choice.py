# SPDX-License-Identifier: BSD-3-Clause
"""The choice of the hosts of an attempt among those that are present: spare hosts, and hosts that fail repeatedly.

A host keeps its place, which is its node rank, from attempt to attempt, and a spare host gets the place of the host
that it replaces: the ranks of all other hosts keep their numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from torchx_monarch.model.registration import Registration


def choose(
    present: Sequence[Registration],
    places: Sequence[int],
    most: int,
    fewest: int,
    excluded: Collection[int] = (),
) -> list[Registration]:
    """Choose the hosts of an attempt; return them in the order of their node ranks.

    Args:
        present: the hosts that can take part, by replica.
        places: replicas of the previous attempt, in the order of their node ranks; empty for none.
        most: number of hosts that the job uses at most.
        fewest: number of hosts that it needs.
        excluded: replicas to leave out, unless fewer than ``fewest`` hosts would be left. Replica 0 always takes part:
            the controller runs there.
    """
    usable = {host.replica: host for host in present if host.replica == 0 or host.replica not in excluded}
    others = sorted(
        (host for host in present if host.replica not in usable), key=lambda host: host.replica not in places
    )
    usable.update((host.replica, host) for host in others[: max(0, fewest - len(usable))])
    taken = [replica if replica in usable else None for replica in places[:most]]
    free = sorted(replica for replica in usable if replica not in taken)
    seats = [*taken, *[None] * (most - len(taken))]
    chosen = [free.pop(0) if replica is None and free else replica for replica in seats]
    return [usable[replica] for replica in chosen if replica is not None]


def machine(host: Registration, others: Collection[Registration]) -> str:
    """Return the name under which the failures of a host are counted: the machine's, unless other hosts share it."""
    name = host.machine or host.hostname
    shared = any((other.machine or other.hostname) == name and other.replica != host.replica for other in others)
    return f"{name} (replica {host.replica})" if shared else name


class HostFailures:
    """The failures of each machine, and the machines that have failed too often.

    Args:
        after: number of failures after which a machine is excluded; 0 for never.
        window: seconds within which failures count.
        clock: returns the time in seconds.
    """

    def __init__(self, after: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.excluded: set[str] = set()
        self._after = after
        self._window = window
        self._clock = clock
        self._failures: dict[str, list[float]] = {}

    @property
    def enabled(self) -> bool:
        """Whether machines are ever excluded."""
        return self._after > 0

    def add(self, name: str) -> bool:
        """Count a failure of a machine; return whether it is the one that excludes the machine."""
        now = self._clock()
        recent = [at for at in self._failures.get(name, ()) if at > now - self._window]
        self._failures[name] = [*recent, now]
        if not self._after or name in self.excluded or len(recent) + 1 < self._after:
            return False
        self.exclude(name)
        return True

    def exclude(self, name: str) -> None:
        """Exclude a machine, however often it has failed."""
        self.excluded.add(name)

    def describe(self, name: str) -> str:
        """Return how often a machine has failed: ``3 failures within 1 h``."""
        count = len(self._failures.get(name, ()))
        hours = self._window / 3600
        within = f"{hours:g} h" if hours >= 1 else f"{self._window:g} s"
        return f"{count} failure{'' if count == 1 else 's'} within {within}"
