# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How many hosts an attempt runs on, and how long it waits for them: torchrun's ``--nnodes MIN:MAX``.

The rules are those of torch's c10d rendezvous (``torch/distributed/elastic/rendezvous/dynamic_rendezvous.py``): the
fewest hosts have ``join_timeout`` seconds to arrive; from then on the others have ``last_call_timeout`` seconds, which
end at once when all are there. A job of fixed size is one whose fewest hosts are all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping

from torchx_monarch.command.command import Command
from torchx_monarch.controller.rendezvous import HostEvent, Registration, Rendezvous
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult


class TooFewHosts(Exception):
    """The fewest hosts that the job needs have not come in time; the message says which are missing."""


@dataclasses.dataclass(frozen=True)
class NodeRange:
    """How many hosts a job runs on.

    Attributes:
        fewest: hosts without which it does not run.
        most: all of the role's replicas.
        join_timeout: seconds that the fewest have to arrive.
        join_option: the option that says so.
        last_call: seconds that are then waited for more.
    """

    fewest: int
    most: int
    join_timeout: float
    join_option: str = "--host-timeout"
    last_call: float = 0.0

    @classmethod
    def of(cls, command: Command | None, replicas: int, timeout: float) -> NodeRange:
        """As torchrun's ``--nnodes`` and ``--rdzv-conf`` say.

        Args:
            command: the role's; None where it could not be read.
            replicas: of the role.
            timeout: seconds to wait for hosts, unless the command says otherwise.
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
        """Whether the job runs on fewer hosts than the role has replicas."""
        return self.fewest < self.most


class HostGatherer:
    """Gathers the hosts of each attempt.

    Args:
        sizes: of the job.
        rendezvous: where the hosts register.
        reporter: what a person sees.
        unreachable: finds the hosts that cannot be reached, and why, by replica (``HostNetwork.unreachable``).
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
        self._reporter = reporter
        self._before: dict[int, Registration] = {}

    async def enough(self, wait: float) -> None:
        """Wait for the hosts of the next attempt.

        Args:
            wait: seconds for more hosts once the fewest are there.

        Raises:
            TooFewHosts: those have not come in time.
        """
        rendezvous, sizes = self._rendezvous, self._sizes
        while True:
            await self._fewest()
            if wait and rendezvous.missing:
                with contextlib.suppress(asyncio.TimeoutError):
                    await self._reporter.while_waiting(
                        asyncio.wait_for(rendezvous.until(self._settled), wait),
                        lambda: f"more hosts, {wait:g} s in all (replica {_listed(rendezvous.missing)})",
                    )
            if rendezvous.present >= sizes.fewest:
                return

    def form(self) -> list[Registration]:
        """The hosts of the next attempt, by replica id; none when some have gone since there were enough."""
        rendezvous, sizes = self._rendezvous, self._sizes
        if rendezvous.present < sizes.fewest:
            return []
        hosts = rendezvous.form()
        size = f" (elastic, {sizes.fewest} to {sizes.most})" if sizes.elastic else ""
        names = [host.hostname for host in hosts]
        self._reporter.phase("hosts", f"hosts {len(hosts)}/{sizes.most}{size}", hosts=names)
        self._report_change(hosts)
        return hosts

    async def newcomer(self) -> Registration:
        """Wait for a host that takes no part yet, and for more: until all are there, or the last call is over."""
        rendezvous = self._rendezvous
        while not (newcomers := await self.reachable_newcomers()):
            await rendezvous.until(lambda: bool(rendezvous.newcomers))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(rendezvous.until(lambda: not rendezvous.missing), self._sizes.last_call)
        return newcomers[0]

    async def reachable_newcomers(self) -> list[Registration]:
        """The hosts that have come; those that cannot be reached are refused before ranks are stopped for them."""
        if refused := await self.refuse(await self.unreachable(self._rendezvous.newcomers)):
            self._reporter.note(refused.kind, refused.verdict.reason, replica=refused.replica)
        return self._rendezvous.newcomers

    async def refuse(self, reasons: Mapping[int, str]) -> HostEvent | None:
        """Let hosts go that cannot take part in an elastic job, which goes on without them.

        Args:
            reasons: why not, by replica.

        Returns:
            The loss of the first of them. None where the job cannot do without: it is not elastic, none is to be
            refused, or it is replica 0.
        """
        if not reasons or 0 in reasons or not self._sizes.elastic:
            return None
        losses = []
        for replica, reason in reasons.items():
            verdict = JobResult(1, reason, replica=replica)
            losses.append(HostEvent(replica, verdict))
            await self._rendezvous.dismiss(replica, verdict)
        for loss in losses[1:]:
            self._reporter.note(loss.kind, loss.verdict.reason, replica=loss.replica)
        return losses[0]

    def shortage(self, replaced: bool) -> str:
        """Why the job cannot go on with the hosts that are left; empty when it can.

        Args:
            replaced: whether the backend starts lost hosts again. One that has not come yet may still come.
        """
        rendezvous, fewest = self._rendezvous, self._sizes.fewest
        if rendezvous.present >= fewest or replaced or rendezvous.expected:
            return ""
        missing = _listed(rendezvous.missing)
        return f"{rendezvous.present} of at least {fewest} hosts left, and replica {missing} will not be replaced"

    def _settled(self) -> bool:
        return not self._rendezvous.missing or self._rendezvous.present < self._sizes.fewest

    async def _fewest(self) -> None:
        rendezvous, sizes = self._rendezvous, self._sizes

        def what() -> str:
            total = f"at least {sizes.fewest}" if sizes.elastic else str(sizes.most)
            return f"host {rendezvous.present + 1} of {total} (replica {_listed(rendezvous.missing)})"

        arrived = asyncio.wait_for(rendezvous.until(lambda: rendezvous.present >= sizes.fewest), sizes.join_timeout)
        try:
            await self._reporter.while_waiting(arrived, what)
        except asyncio.TimeoutError:
            within = f"within {sizes.join_timeout:g} s ({sizes.join_option})"
            missing = f"replica {_listed(rendezvous.missing)}"
            if not sizes.elastic:
                raise TooFewHosts(f"{missing} did not arrive {within}") from None
            count = f"{rendezvous.present} of at least {sizes.fewest} hosts"
            raise TooFewHosts(f"{count} arrived {within}: {missing} did not") from None

    def _report_change(self, hosts: list[Registration]) -> None:
        before, now = self._before, {host.replica: host for host in hosts}
        self._before = now
        if not before or len(before) == len(now):
            return
        changes = []
        if came := now.keys() - before.keys():
            changes.append(f"replica {_listed(came)} came")
        if went := before.keys() - now.keys():
            changes.append(f"replica {_listed(went)} went")
        text = f"size changed from {len(before)} to {len(now)} hosts: {', '.join(changes)}"
        self._reporter.note("resize", text, before=len(before), now=len(now))


def _listed(replicas: Iterable[int]) -> str:
    return ", ".join(str(replica) for replica in sorted(replicas))
