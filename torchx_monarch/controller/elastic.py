# SPDX-License-Identifier: BSD-3-Clause
"""The hosts of an attempt: how many, how long it waits for them, and which of those that are registered it uses.

The rules are those of torch's c10d rendezvous (``torch/distributed/elastic/rendezvous/dynamic_rendezvous.py``). The
minimum number of hosts has ``join_timeout`` seconds to arrive. Then the other hosts have ``last_call_timeout`` seconds,
or less if all arrive earlier. In a job of fixed size the minimum is the number of replicas.

A host keeps its place, which is its node rank, from attempt to attempt, and a spare host gets the place of the host
that it replaces: the ranks of all other hosts keep their numbers.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from torchx_monarch.controller.host_events import Changes, HostEvent, HostExcluded
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.world import consecutive

if TYPE_CHECKING:
    from torchx_monarch.command.command import Command

_MAX_RUNS = 50
"""Runs of replicas that one line names."""

_ORDER_TIMEOUT = 2.0
"""Seconds for which the first attempt waits for hosts with lower numbers when a spare host has arrived before them."""


_FAILURES_WITHIN = 3600.0
"""Seconds within which the failures of a host count."""


class TooFewHosts(Exception):
    """Fewer hosts than the minimum arrived in time; the message says which are missing."""


@dataclasses.dataclass(frozen=True)
class NodeRange:
    """The number of hosts on which a job runs: ``most`` is that of the role's replicas without the spare ones.

    ``fewest`` have ``join_timeout`` seconds to arrive, and further ones ``last_call`` seconds after that.
    """

    fewest: int
    most: int
    join_timeout: float
    last_call: float = 0.0
    spares: int = 0

    @classmethod
    def from_command(cls, command: Command | None, replicas: int, timeout: float, spares: int = 0) -> NodeRange:
        """Derive the range from torchrun's ``--nnodes`` and ``--rdzv-conf``, if the command can be parsed."""
        if command is None:
            return cls(replicas, replicas, timeout, spares=spares)
        conf = command.options.rdzv_conf
        timeout = timeout if conf.join_timeout is None else conf.join_timeout
        return cls(command.fewest(replicas), replicas, timeout, last_call=conf.last_call_timeout, spares=spares)

    @property
    def elastic(self) -> bool:
        return self.fewest < self.most

    @property
    def can_lose(self) -> bool:
        """Whether the job can go on without one of its hosts: it is elastic, or has spare hosts."""
        return self.elastic or self.spares > 0


class HostRegistry:
    """The hosts of a role that are registered.

    A job has up to thousands of hosts, and each registers: what an event changes is counted, and never searched for.

    Attributes:
        members: the members of the present attempt, in the order of their node ranks; empty before the first.
        on_idle_change: called when hosts that are no members have changed, with the loss of one or with None.
    """

    def __init__(self, replicas: int) -> None:
        self.registered: dict[int, Registration] = {}
        self.members: Sequence[Registration] = ()
        self.on_idle_change: Callable[[HostEvent | None], None] = lambda loss: None
        self._replicas = replicas
        self._member_of: dict[int, Registration] = {}
        self._able_idle: set[int] = set()
        self._machines = Counter[str]()
        self._seen: set[int] = set()
        self._failed: set[int] = set()
        self._refused: set[int] = set()
        self._changes = Changes()
        self.until, self.notify = self._changes.until, self._changes.notify

    def add(self, host: Registration) -> None:
        self._forget(host.replica)
        self.registered[host.replica] = host
        self._machines[_machine(host)] += 1
        if host.error:
            self._failed.add(host.replica)
        elif self.is_idle(host):
            self._able_idle.add(host.replica)
        self._seen.add(host.replica)
        self.notify()

    def remove(self, replica: int) -> bool:
        """Forget a host; return whether it was registered. From here on its replacement may register."""
        removed = self._forget(replica)
        if removed:
            self.notify()
        return removed

    def _forget(self, replica: int) -> bool:
        host = self.registered.pop(replica, None)
        self._failed.discard(replica)
        self._able_idle.discard(replica)
        if host is not None:
            self._machines[_machine(host)] -= 1
        return host is not None

    def form(self, members: Sequence[Registration]) -> None:
        """Begin an attempt with these hosts, in the order of their node ranks."""
        self.members = members
        self._member_of = {host.replica: host for host in members}
        self._able_idle = {host.replica for host in self.registered.values() if self.is_idle(host) and not host.error}

    @property
    def formed(self) -> bool:
        """Whether an attempt has been formed."""
        return bool(self.members)

    def add_refused(self, replica: int) -> int:
        """Add a host that cannot start; return the number of replicas whose host could not."""
        self._seen.add(replica)
        self._refused.add(replica)
        return len(self._refused)

    def is_idle(self, host: Registration) -> bool:
        """Return whether a host is no member of the present attempt."""
        return self.formed and self._member_of.get(host.replica) is not host

    @property
    def has_able_idle(self) -> bool:
        """Whether a registered host that can take part is no member of the present attempt."""
        return bool(self._able_idle)

    def machine(self, host: Registration) -> str:
        """Return the name under which failures of a host count: the machine's, unless other hosts share it."""
        name, registered = _machine(host), self.registered.get(host.replica)
        others = self._machines[name] - (registered is not None and _machine(registered) == name)
        return f"{name} (replica {host.replica})" if others else name

    @property
    def able(self) -> list[Registration]:
        """The registered hosts that can take part, by replica."""
        return [host for _, host in sorted(self.registered.items()) if not host.error]

    @property
    def is_complete(self) -> bool:
        """Whether all replicas are registered."""
        return len(self.registered) == self._replicas

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


class HostGatherer:
    """Gather the hosts of each attempt."""

    def __init__(self, sizes: NodeRange, registry: HostRegistry, reporter: Reporter, failures: HostFailures) -> None:
        self._sizes = sizes
        self._registry = registry
        self._reporter = reporter
        self._failures = failures
        self._reported_spares = frozenset[int]()
        registry.on_idle_change = self._report_idle_change

    async def gather(self, wait: float) -> list[Registration]:
        """Wait for the hosts of the next attempt, and ``wait`` seconds for further ones; return them by node rank.

        Raises:
            TooFewHosts: fewer hosts than the minimum arrived in time.
        """
        registry, sizes = self._registry, self._sizes
        while True:
            await self._fewest()
            if sizes.spares and not registry.formed and not self._are_first():
                await registry.until(self._are_first, _ORDER_TIMEOUT)
            if wait and not self._settled():
                await self._reporter.while_waiting(
                    registry.until(self._settled, wait),
                    lambda: f"more hosts, {wait:g} s in all (replica {listed(registry.missing)})",
                )
            if registry.present >= sizes.fewest:
                return self._form()

    def _form(self) -> list[Registration]:
        registry, sizes = self._registry, self._sizes
        before, hosts = registry.members, self._choose()
        registry.form(hosts)
        size = f" (elastic, {sizes.fewest} to {sizes.most})" if sizes.elastic else ""
        names = [host.hostname for host in hosts]
        self._reporter.phase("hosts", f"hosts {len(hosts)}/{sizes.most}{size}", count=len(hosts), hosts=names)
        if before:
            self._report_change(before, hosts)
        self._report_spares()
        return hosts

    async def newcomer(self) -> Registration:
        """Wait for a host that is not in the attempt, and then for all others or the end of the last call."""
        registry = self._registry
        while not (newcomers := self.newcomers()):
            await registry.until(lambda: bool(self.newcomers()))
            await registry.until(self._settled, self._sizes.last_call)
        return newcomers[0]

    def newcomers(self) -> list[Registration]:
        """Return the hosts that would join the present attempt if it were formed now."""
        if not self._registry.has_able_idle:
            return []
        return [host for host in self._choose() if self._registry.is_idle(host)]

    def blame(self, host: Registration, reason: str) -> HostExcluded | None:
        """Count a failure of a host; return the event that puts another host in its place, if it is excluded now."""
        if len(self._registry.registered) == 1:  # no other host can take its place
            return None
        name = self._registry.machine(host)
        if not (failures := self._failures.add(name)):
            return None
        message = f"{name} is excluded after {failures}, the last: {reason}"
        if host.replica in {chosen.replica for chosen in self._choose()}:
            why = "the controller runs there" if host.replica == 0 else "no other host can take its place now"
            message = f"{message}; it stays, because {why}"
        elif host in self._registry.able:
            return HostExcluded(host.replica, JobResult(1, message, replica=host.replica), host=name)
        self._reporter.report(HostExcluded.KIND, message, replica=host.replica, host=name)
        return None

    def _report_spares(self) -> None:
        if not self._sizes.spares:
            return
        registry, excluded = self._registry, self._excluded()
        spares = [host for host in registry.able if registry.is_idle(host) and host.replica not in excluded]
        if frozenset(host.replica for host in spares) != self._reported_spares:
            self._reported_spares = frozenset(host.replica for host in spares)
            text = f"spare: {', '.join(host.name for host in spares)}" if spares else "no spare host is left"
            self._reporter.report(
                "spares", text, replicas=sorted(self._reported_spares), hosts=[host.hostname for host in spares]
            )

    def shortage(self, replaced: bool) -> str:
        """Return why the job cannot go on with the remaining hosts; empty if it can, or the backend replaces lost ones.

        A replica that has never registered may still arrive.
        """
        registry, fewest = self._registry, self._sizes.fewest
        if registry.present >= fewest or replaced or registry.expected:
            return ""
        missing = listed(registry.missing)
        return f"{registry.present} of at least {fewest} hosts left, and replica {missing} will not be replaced"

    def _settled(self) -> bool:
        present, sizes = self._registry.present, self._sizes
        return self._registry.is_complete or not sizes.fewest <= present < sizes.most

    def _are_first(self) -> bool:
        """Whether the hosts that are no spare ones have registered, so that a spare one is not used in their place."""
        return all(replica in self._registry.registered for replica in range(self._sizes.most))

    def _choose(self) -> list[Registration]:
        sizes, places = self._sizes, [host.replica for host in self._registry.members] if self._sizes.spares else []
        return choose(self._registry.able, places, most=sizes.most, fewest=sizes.fewest, excluded=self._excluded())

    def _excluded(self) -> set[int]:
        if not self._failures.excluded:
            return set()
        registry = self._registry
        return {host.replica for host in registry.able if registry.machine(host) in self._failures.excluded}

    def _report_idle_change(self, loss: HostEvent | None) -> None:
        if loss is not None:
            self._reporter.line(f"{loss.result.reason}; it ran no ranks")
        self._report_spares()

    async def _fewest(self) -> None:
        registry, sizes = self._registry, self._sizes

        def what() -> str:
            total = f"at least {sizes.fewest}" if sizes.elastic else str(sizes.most)
            return f"host {registry.present + 1} of {total} (replica {listed(registry.missing)})"

        arrived = registry.until(lambda: registry.present >= sizes.fewest, sizes.join_timeout)
        if await self._reporter.while_waiting(arrived, what):
            return
        within = f"within {sizes.join_timeout:g} s (--host-timeout, or join_timeout of --rdzv-conf)"
        missing = f"replica {listed(registry.missing)}"
        if not sizes.elastic:
            raise TooFewHosts(f"{missing} did not arrive {within}")
        count = f"{registry.present} of at least {sizes.fewest} hosts"
        raise TooFewHosts(f"{count} arrived {within}: {missing} did not")

    def _report_change(self, before: Sequence[Registration], now: Sequence[Registration]) -> None:
        old_replicas, new_replicas = ({host.replica for host in hosts} for hosts in (before, now))
        came, went = new_replicas - old_replicas, old_replicas - new_replicas
        if len(before) == len(now):
            for old, new in zip(before, now, strict=True):
                if old.replica != new.replica and new.replica in came:
                    text = f"{new.name} takes the place of host {old.replica} ({old.hostname})"
                    more = {"replica": new.replica, "replaces": old.replica, "host": new.hostname}
                    if old in self._registry.able:  # it was excluded, and that was counted as a restart before
                        self._reporter.report("spare_used", text, **more)
                    else:
                        self._reporter.restarted(text, **more)
            return
        changes = [f"replica {listed(some)} {verb}" for some, verb in ((came, "came"), (went, "went")) if some]
        text = f"size changed from {len(before)} to {len(now)} hosts: {', '.join(changes)}"
        self._reporter.report("resize", text, before=len(before), now=len(now))


def listed(replicas: Iterable[int]) -> str:
    """Return numbers of replicas for a person, ``0, 1, 4-4095``: a line must not grow with the job."""
    shown = [
        str(first) if first == last else f"{first}{'-' if last > first + 1 else ', '}{last}"
        for first, last in consecutive(sorted(replicas))
    ]
    if len(shown) > _MAX_RUNS:
        shown[_MAX_RUNS:] = [f"and {len(shown) - _MAX_RUNS} more"]
    return ", ".join(shown)


def choose(
    present: Sequence[Registration],
    places: Sequence[int],
    most: int,
    fewest: int,
    excluded: Collection[int] = (),
) -> list[Registration]:
    """Choose the hosts of an attempt; return them by node rank.

    ``places`` are the replicas of the previous attempt, by node rank. Excluded replicas are left out, unless fewer than
    ``fewest`` hosts would be left. Replica 0 always takes part: the controller runs there.
    """
    usable = {host.replica: host for host in present if host.replica == 0 or host.replica not in excluded}
    had_place = set(places)
    others = sorted((host for host in present if host.replica not in usable), key=lambda h: h.replica not in had_place)
    usable.update((host.replica, host) for host in others[: max(0, fewest - len(usable))])
    taken = [replica if replica in usable else None for replica in places[:most]]
    free = iter(sorted(usable.keys() - set(taken)))
    seats = [*taken, *[None] * (most - len(taken))]
    chosen = [next(free, None) if replica is None else replica for replica in seats]
    return [usable[replica] for replica in chosen if replica is not None]


def _machine(host: Registration) -> str:
    return host.machine or host.hostname


class HostFailures:
    """The failures of each machine, and the machines that are excluded: those with ``after`` failures within an hour,
    0 for never."""

    def __init__(self, after: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.excluded: set[str] = set()
        self._after = after
        self._clock = clock
        self._failures: dict[str, list[float]] = {}

    def add(self, name: str) -> str:
        """Count a failure of a machine; return how many there were if it excludes the machine, else an empty text."""
        now = self._clock()
        recent = [*(at for at in self._failures.get(name, ()) if at > now - _FAILURES_WITHIN), now]
        self._failures[name] = recent
        if not self._after or name in self.excluded or len(recent) < self._after:
            return ""
        self.excluded.add(name)
        return f"{len(recent)} failure{'' if len(recent) == 1 else 's'} within 1 h"
