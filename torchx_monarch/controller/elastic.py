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
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from torchx_monarch.controller.host_events import HostExcluded, StopRequested
from torchx_monarch.controller.members import Members
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import NodeFault, Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.world import consecutive

if TYPE_CHECKING:
    from torchx_monarch.command.command import Command

_MAX_RUNS = 50
"""Runs of replicas that one line names."""

_ORDER_TIMEOUT = 2.0
"""Seconds for which the first attempt waits for hosts with lower numbers when a spare host has arrived before them."""


_FAILURES_WITHIN = 3600.0
"""Seconds within which the failures of a host count for ``exclude_after``."""


@dataclasses.dataclass(frozen=True)
class NodeRange:
    """The number of hosts on which a job runs.

    Attributes:
        min_hosts: they have ``join_timeout`` seconds to arrive.
        max_hosts: without the spare ones; those above the minimum have ``last_call`` seconds more.
    """

    min_hosts: int
    max_hosts: int
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
        return cls(command.min_nodes(replicas), replicas, timeout, last_call=conf.last_call_timeout, spares=spares)

    @property
    def elastic(self) -> bool:
        return self.min_hosts < self.max_hosts

    @property
    def can_lose(self) -> bool:
        """Whether the job can go on without one of its hosts: it is elastic, or has spare hosts."""
        return self.elastic or self.spares > 0


class HostGatherer:
    """Gather the hosts of each attempt."""

    def __init__(self, sizes: NodeRange, members: Members, reporter: Reporter, exclude_after: int) -> None:
        self._sizes = sizes
        self._members = members
        self._reporter = reporter
        self._exclude_after = exclude_after
        self._failures: dict[str, list[float]] = {}
        """When hosts have failed, by machine."""
        self._excluded_machines: set[str] = set()
        self._spares_text = ""
        members.on_idle_change = self._report_spares

    async def gather(self, wait: float) -> StopRequested | None:
        """Wait for the hosts of the next attempt, and ``wait`` seconds for further ones; form the attempt.

        If fewer than the minimum arrive in time, return the end of the job.
        """
        members, sizes = self._members, self._sizes
        while True:
            if failure := await self._wait_for_minimum():
                return StopRequested(0, JobResult(1, failure))
            if sizes.spares and not members.attempt.hosts and not self._needs_no_spare():
                await members.until(self._needs_no_spare, _ORDER_TIMEOUT)
            if wait and not self._is_last_call_over():
                await self._reporter.while_waiting(
                    members.until(self._is_last_call_over, wait),
                    lambda: f"more hosts, {wait:g} s in all (replica {listed(members.missing)})",
                )
            if members.able_count >= sizes.min_hosts:
                self._form()
                return None

    def _form(self) -> None:
        members, sizes = self._members, self._sizes
        before, hosts = members.hosts, self._choose()
        members.form(hosts)
        size = f" (elastic, {sizes.min_hosts} to {sizes.max_hosts})" if sizes.elastic else ""
        self._reporter.phase("hosts", f"hosts {len(hosts)}/{sizes.max_hosts}{size}", count=len(hosts))
        if before:
            self._report_change(before, hosts)
        self._report_spares()

    async def newcomer(self) -> Registration:
        """Wait for a host that is not in the attempt, and then for all others or the end of the last call."""
        members = self._members
        while not (newcomers := self.newcomers()):
            await members.until(lambda: bool(self.newcomers()))
            await members.until(self._is_last_call_over, self._sizes.last_call)
        return newcomers[0]

    def newcomers(self) -> list[Registration]:
        """Return the hosts that would join the present attempt if it were formed now."""
        if not self._members.idle:
            return []
        return [host for host in self._choose() if not self._members.in_attempt(host.replica)]

    def blame(self, replica: int, fault: NodeFault, reason: str) -> HostExcluded | None:
        """Count a failure of a host of the attempt; return the event that replaces it, if it is excluded now."""
        members, member = self._members, self._members.attempt.hosts.get(replica)
        if member is None:
            return None
        if len(members.attempt.hosts) > 1:  # of a failure on the only one nobody can tell that another would be better
            self._reporter.record("node_fault", reason, node=member.host.node, fault=fault)
        if members.registered_count == 1:  # no other host can take its place
            return None
        name = members.machine(member.host)
        now = time.monotonic()
        recent = [*(at for at in self._failures.get(name, ()) if at > now - _FAILURES_WITHIN), now]
        self._failures[name] = recent
        if name in self._excluded_machines or not 0 < self._exclude_after <= len(recent):
            return None
        self._excluded_machines.add(name)
        failures = f"{len(recent)} failure{'' if len(recent) == 1 else 's'} within 1 h"
        return self._excluded(replica, f"{name} is excluded after {failures}, the last: {reason}")

    def exclude(self, replica: int, reason: str) -> HostExcluded | None:
        """Exclude a host of the attempt at once; return the event that replaces it, if another one can do that."""
        members, member = self._members, self._members.attempt.hosts.get(replica)
        if member is None or members.registered_count == 1:
            return None
        self._excluded_machines.add(name := members.machine(member.host))
        return self._excluded(replica, f"{name} is excluded: {reason}")

    def _excluded(self, replica: int, message: str) -> HostExcluded | None:
        if replica in {chosen.replica for chosen in self._choose()}:
            why = "the controller runs there" if replica == 0 else "no other host can take its place now"
            message = f"{message}; it stays, because {why}"
        elif self._members.in_attempt(replica):
            return HostExcluded(replica, JobResult(1, message, replica=replica))
        self._reporter.report(HostExcluded.KIND, message, replica=replica)
        return None

    def _report_spares(self) -> None:
        if not (self._sizes.spares and self._members.attempt.hosts):
            return
        spares = [host for host in self._members.idle if not self._is_excluded(host)]
        text = f"spare: {', '.join(host.name for host in spares)}" if spares else "no spare host is left"
        if text != self._spares_text:
            self._spares_text = text
            replicas, hosts = [host.replica for host in spares], [host.hostname for host in spares]
            self._reporter.report("spares", text, replicas=replicas, hosts=hosts)

    def why_too_few(self, are_replaced: bool) -> str:
        """Return why the job cannot go on with the remaining hosts; empty if it can, or the backend replaces lost ones.

        A replica that has never registered may still arrive.
        """
        members, sizes = self._members, self._sizes
        if members.able_count >= sizes.min_hosts or are_replaced or members.unseen:
            return ""
        missing = f"replica {listed(members.missing)}"
        return f"{members.able_count} of at least {sizes.min_hosts} hosts left, and {missing} will not be replaced"

    def _is_last_call_over(self) -> bool:
        """Whether no further host is waited for: none is missing, or there are enough, or too few for an attempt."""
        members, sizes = self._members, self._sizes
        return members.is_complete or not sizes.min_hosts <= members.able_count < sizes.max_hosts

    def _needs_no_spare(self) -> bool:
        """Whether all hosts but spare ones have registered, so that no spare one is used in the place of a late one."""
        first, end = self._sizes.max_hosts, self._sizes.max_hosts + self._sizes.spares
        late = sum(not self._members.registered(replica) for replica in range(first, end))
        return self._members.registered_count == end - late

    def _choose(self) -> list[Registration]:
        members, sizes = self._members, self._sizes
        hosts, places = members.able, list(members.attempt.hosts) if sizes.spares else []
        excluded = {host.replica for host in hosts if self._is_excluded(host)}
        return choose(hosts, places, max_hosts=sizes.max_hosts, min_hosts=sizes.min_hosts, excluded=excluded)

    def _is_excluded(self, host: Registration) -> bool:
        return bool(self._excluded_machines) and self._members.machine(host) in self._excluded_machines

    async def _wait_for_minimum(self) -> str:
        """Wait for as many hosts as an attempt needs; return why they are not there in time, empty if they are."""
        members, sizes = self._members, self._sizes

        def what() -> str:
            total = f"at least {sizes.min_hosts}" if sizes.elastic else str(sizes.max_hosts)
            return f"host {members.able_count + 1} of {total} (replica {listed(members.missing)})"

        arrived = members.until(lambda: members.able_count >= sizes.min_hosts, sizes.join_timeout)
        if await self._reporter.while_waiting(arrived, what):
            return ""
        within = f"within {sizes.join_timeout:g} s (--host-timeout, or join_timeout of --rdzv-conf)"
        missing = f"replica {listed(members.missing)}"
        if not sizes.elastic:
            return f"{missing} did not arrive {within}"
        return f"{members.able_count} of at least {sizes.min_hosts} hosts arrived {within}: {missing} did not"

    def _report_change(self, before: Sequence[Registration], now: Sequence[Registration]) -> None:
        old_replicas, new_replicas = ({host.replica for host in hosts} for hosts in (before, now))
        came, went = new_replicas - old_replicas, old_replicas - new_replicas
        if len(before) == len(now):
            for old, new in zip(before, now, strict=True):
                if old.replica != new.replica and new.replica in came:
                    text = f"{new.name} takes the place of host {old.replica} ({old.hostname})"
                    more = {"replica": new.replica, "replaces": old.replica, "host": new.hostname}
                    was_excluded = self._members.registered(old.replica) is old
                    if was_excluded:  # which was counted as a restart then
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
    max_hosts: int,
    min_hosts: int,
    excluded: Collection[int] = (),
) -> list[Registration]:
    """Choose the hosts of an attempt; return them by node rank.

    ``places`` are the replicas of the previous attempt, by node rank. Excluded replicas are left out, unless fewer than
    ``min_hosts`` hosts would be left. Replica 0 always takes part: the controller runs there.
    """
    usable = {host.replica: host for host in present if host.replica == 0 or host.replica not in excluded}
    had_place = set(places)
    others = sorted((host for host in present if host.replica not in usable), key=lambda h: h.replica not in had_place)
    usable.update((host.replica, host) for host in others[: max(0, min_hosts - len(usable))])
    taken = [replica if replica in usable else None for replica in places[:max_hosts]]
    free = iter(sorted(usable.keys() - set(taken)))
    seats = [*taken, *[None] * (max_hosts - len(taken))]
    chosen = [next(free, None) if replica is None else replica for replica in seats]
    return [usable[replica] for replica in chosen if replica is not None]
