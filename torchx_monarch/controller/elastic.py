# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The number of hosts of an attempt, and how long the attempt waits for them: torchrun's ``--nnodes MIN:MAX``.

The rules are those of torch's c10d rendezvous (``torch/distributed/elastic/rendezvous/dynamic_rendezvous.py``). The
minimum number of hosts has ``join_timeout`` seconds to arrive. Then the other hosts have ``last_call_timeout`` seconds,
or less if all arrive earlier. In a job of fixed size the minimum is the number of replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping

from torchx_monarch.command.command import Command
from torchx_monarch.controller.host_events import HostLost
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration

_MAX_RUNS = 50
"""Runs of replicas that one line names."""


class TooFewHosts(Exception):
    """Fewer hosts than the minimum arrived in time; the message says which are missing."""


@dataclasses.dataclass(frozen=True)
class NodeRange:
    """The number of hosts on which a job runs.

    Attributes:
        fewest: minimum number of hosts.
        most: maximum number of hosts, which is the number of the role's replicas.
        join_timeout: seconds for the minimum number of hosts to arrive.
        join_option: the option that sets ``join_timeout``, for messages.
        last_call: seconds to wait for further hosts after the minimum has arrived.
    """

    fewest: int
    most: int
    join_timeout: float
    join_option: str = "--host-timeout"
    last_call: float = 0.0

    @classmethod
    def of(cls, command: Command | None, replicas: int, timeout: float) -> NodeRange:
        """Derive the range from torchrun's ``--nnodes`` and ``--rdzv-conf``.

        Args:
            command: the role's command; None if it cannot be parsed.
            replicas: number of replicas of the role.
            timeout: seconds to wait for hosts, unless the command sets ``join_timeout``.
        """
        if command is None:
            return cls(replicas, replicas, timeout)
        conf = command.options.rdzv_conf
        sizes = cls(command.fewest(replicas), replicas, timeout, last_call=conf.last_call_timeout)
        if conf.join_timeout is None:
            return sizes
        option = f"--rdzv-conf join_timeout={conf.join_timeout}"
        return dataclasses.replace(sizes, join_timeout=conf.join_timeout, join_option=option)

    @property
    def elastic(self) -> bool:
        """Whether the job can run on fewer hosts than the role has replicas."""
        return self.fewest < self.most


class HostGatherer:
    """Gather the hosts of each attempt.

    Args:
        sizes: number of hosts of the job.
        rendezvous: the rendezvous at which the hosts register.
        reporter: writes progress lines and events.
        unreachable: returns the reason for each host that cannot be reached, by replica (``HostNetwork.unreachable``).
    """

    def __init__(
        self,
        sizes: NodeRange,
        rendezvous: Rendezvous,
        reporter: Reporter,
        unreachable: Callable[[Iterable[Registration]], Awaitable[dict[int, str]]],
    ) -> None:
        self.unreachable = unreachable
        self._sizes = sizes
        self._rendezvous = rendezvous
        self._registry = rendezvous.hosts
        self._reporter = reporter
        self._before: dict[int, Registration] = {}

    async def enough(self, wait: float) -> None:
        """Wait for the hosts of the next attempt.

        Args:
            wait: seconds to wait for further hosts after the minimum has arrived.

        Raises:
            TooFewHosts: fewer hosts than the minimum arrived in time.
        """
        registry, sizes = self._registry, self._sizes
        while True:
            await self._fewest()
            if wait and registry.missing:
                with contextlib.suppress(asyncio.TimeoutError):
                    await self._reporter.while_waiting(
                        asyncio.wait_for(registry.until(self._settled), wait),
                        lambda: f"more hosts, {wait:g} s in all (replica {listed(registry.missing)})",
                    )
            if registry.present >= sizes.fewest:
                return

    def form(self) -> list[Registration]:
        """Return the hosts of the next attempt by replica id; empty if too few are left of those that had arrived."""
        registry, sizes = self._registry, self._sizes
        if registry.present < sizes.fewest:
            return []
        hosts = registry.form()
        size = f" (elastic, {sizes.fewest} to {sizes.most})" if sizes.elastic else ""
        names = [host.hostname for host in hosts]
        self._reporter.phase("hosts", f"hosts {len(hosts)}/{sizes.most}{size}", hosts=names)
        self._report_change(hosts)
        return hosts

    async def newcomer(self) -> Registration:
        """Wait for a host that is not in the attempt, and then for all others or the end of the last call."""
        registry = self._registry
        while not (newcomers := await self.reachable_newcomers()):
            await registry.until(lambda: bool(registry.newcomers))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(registry.until(lambda: not registry.missing), self._sizes.last_call)
        return newcomers[0]

    async def reachable_newcomers(self) -> list[Registration]:
        """Return the hosts that are not in the attempt, and refuse the unreachable ones before any rank is stopped."""
        if refused := await self.refuse(await self.unreachable(self._registry.newcomers)):
            self._reporter.note(refused.KIND, refused.result.reason, replica=refused.replica)
        return self._registry.newcomers

    async def refuse(self, reasons: Mapping[int, str]) -> HostLost | None:
        """Dismiss hosts that cannot take part in an elastic job, which goes on without them.

        Args:
            reasons: why each host cannot take part, by replica; empty for none.

        Returns:
            The loss of the first of these hosts. None if the job cannot dismiss them: it is not elastic, ``reasons`` is
            empty, or replica 0 is among them.
        """
        if not reasons or 0 in reasons or not self._sizes.elastic:
            return None
        losses = []
        for replica, reason in reasons.items():
            result = JobResult(1, reason, replica=replica)
            losses.append(HostLost(replica, result))
            await self._rendezvous.dismiss(replica, result)
        for loss in losses[1:]:
            self._reporter.note(loss.KIND, loss.result.reason, replica=loss.replica)
        return losses[0]

    def shortage(self, replaced: bool) -> str:
        """Return why the job cannot go on with the remaining hosts; empty if it can.

        Args:
            replaced: whether the backend replaces lost hosts. A replica that has never registered may still arrive.
        """
        registry, fewest = self._registry, self._sizes.fewest
        if registry.present >= fewest or replaced or registry.expected:
            return ""
        missing = listed(registry.missing)
        return f"{registry.present} of at least {fewest} hosts left, and replica {missing} will not be replaced"

    def _settled(self) -> bool:
        return not self._registry.missing or self._registry.present < self._sizes.fewest

    async def _fewest(self) -> None:
        registry, sizes = self._registry, self._sizes

        def what() -> str:
            total = f"at least {sizes.fewest}" if sizes.elastic else str(sizes.most)
            return f"host {registry.present + 1} of {total} (replica {listed(registry.missing)})"

        arrived = asyncio.wait_for(registry.until(lambda: registry.present >= sizes.fewest), sizes.join_timeout)
        try:
            await self._reporter.while_waiting(arrived, what)
        except asyncio.TimeoutError:
            within = f"within {sizes.join_timeout:g} s ({sizes.join_option})"
            missing = f"replica {listed(registry.missing)}"
            if not sizes.elastic:
                raise TooFewHosts(f"{missing} did not arrive {within}") from None
            count = f"{registry.present} of at least {sizes.fewest} hosts"
            raise TooFewHosts(f"{count} arrived {within}: {missing} did not") from None

    def _report_change(self, hosts: list[Registration]) -> None:
        before, now = self._before, {host.replica: host for host in hosts}
        self._before = now
        if not before or len(before) == len(now):
            return
        changes = []
        if came := now.keys() - before.keys():
            changes.append(f"replica {listed(came)} came")
        if went := before.keys() - now.keys():
            changes.append(f"replica {listed(went)} went")
        text = f"size changed from {len(before)} to {len(now)} hosts: {', '.join(changes)}"
        self._reporter.note("resize", text, before=len(before), now=len(now))


def listed(replicas: Iterable[int]) -> str:
    """Return numbers of replicas for a person, ``0, 1, 4-4095``: a line must not grow with the job."""
    runs: list[list[int]] = []
    for replica in sorted(replicas):
        if runs and replica == runs[-1][1] + 1:
            runs[-1][1] = replica
        else:
            runs.append([replica, replica])
    shown = [
        str(first) if first == last else f"{first}{'-' if last > first + 1 else ', '}{last}" for first, last in runs
    ]
    return ", ".join([*shown[:_MAX_RUNS], *([f"and {len(shown) - _MAX_RUNS} more"] if len(shown) > _MAX_RUNS else [])])
