# SPDX-License-Identifier: BSD-3-Clause
"""Watch the ranks of an attempt for what slows them, report the verdict, and act on it as the user has asked.

``HangWatch`` asks the hosts for both. What is kept of a host is constant, however long the job runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import time
from collections.abc import Mapping

from torchx_monarch.controller.host_messages import ReadCollectives, TakeStacks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight.hangs import HostCollectives
from torchx_monarch.insight.job_end import run_hook
from torchx_monarch.insight.pace import (
    MAX_PACES,
    WARM_UP,
    HostPace,
    Pace,
    RankPace,
    Suspect,
    find_slow,
    find_suspect,
    may_become_slow,
    pace_of,
    ranks_of,
    share_now,
    with_clock,
)
from torchx_monarch.insight.slowness import MACHINE_KINDS, Activity, Slowness, activity, explain, lacks_processor
from torchx_monarch.insight.stacks import ProcessStacks
from torchx_monarch.insight.summary import show_duration

_EVERY = 5.0
"""Seconds between two paces; more in a job of many hosts, whose answers take replica 0 some time."""

FIRST_PACE = 3.0
"""Seconds until the first one, and between those that do not count."""

_EVERY_SUSPECTED = 1.5
"""The same while ranks may be slow, or become so."""

_HOSTS_A_SECOND = 250

_CALLS = 1 << 16
"""Calls of a group of which all hosts tell together; each tells of 16 to 256."""

_TOO_OLD = 10
"""Paces in which nothing was done after which those before count no more."""

_ROUNDS = 15
_ROUND_EVERY = 0.06
"""Mean seconds between two rounds. They differ: at multiples of the seconds of a step a rank is always at one place."""

_STACKS_TIMEOUT = 2.0

_MAX_STACKS = 2
"""Ranks of each side whose stacks are taken in a round."""


class SlowWatch:
    """Find what slows the ranks of an attempt."""

    def __init__(self, hosts: JobHosts) -> None:
        self._hosts = hosts
        self._members = hosts.members
        self._reporter = hosts.reporter
        self._hook: asyncio.Task[None] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget what was before, as at the beginning of an attempt, or after a pause of the watch."""
        self._paces: list[Pace] = []
        self._past: dict[int, RankPace] = {}
        self._asked = 0.0
        """When what ``_past`` has of each rank was told."""
        self._found: tuple[Suspect, Slowness] | None = None
        """Who was found to be slow, and is until now."""
        self._lost = 0.0
        self._suspected: tuple[int, ...] = ()
        self._suspicions = 0
        """Paces in a row in which ranks may be slow."""
        self._own: list[Activity] = []
        """What the ranks ``_suspected`` did."""
        self._theirs: list[Activity] = []
        """What ranks that may wait for them did."""

    def request(self) -> ReadCollectives:
        """Return the request whose answers ``observe`` takes."""
        self._sent = time.time()
        self._calls = min(256, max(16, _CALLS // max(1, len(self._members.attempt.hosts))))
        return ReadCollectives(False, max(1.0, self._sent - self._asked) if self._asked else _EVERY, self._calls)

    async def observe(self, answers: Mapping[int, HostCollectives]) -> float:
        """Conclude from the answers of all hosts; return the seconds until the next ones are due."""
        usual = FIRST_PACE if len(self._paces) < WARM_UP else _EVERY
        now, at_rest = time.time(), max(usual, len(answers) / _HOSTS_A_SECOND)
        paces = {replica: self._by_own_clock(answer.pace, now) for replica, answer in answers.items()}
        if not paces or not all(pace.time for pace in paces.values()):
            return at_rest
        # In a thread: thousands of hosts have many calls.
        pace = await asyncio.to_thread(pace_of, self._past, paces.values(), now, now - self._asked, self._calls)
        ranks = ranks_of(paces.values())
        if pace is not None or ranks.keys() != self._past.keys() or now - self._asked > _TOO_OLD * at_rest:
            self._past, self._asked = ranks, now
        if pace is None:
            hurries = self._found is None and (self._suspicions > 0 or may_become_slow(self._paces))
            return _EVERY_SUSPECTED if hurries else at_rest
        self._paces.append(pace)
        del self._paces[:-MAX_PACES]
        if self._found is not None:
            self._follow(*self._found, pace)
            return at_rest
        hosts = {rank.rank: replica for replica, host in paces.items() for rank in host.ranks}
        self._suspicions += 1
        slow, began = find_slow(self._paces, hosts), time.monotonic()
        suspect = slow or find_suspect(self._paces, hosts, self._suspicions)
        if suspect is None:
            self._suspicions = 0
            return _EVERY_SUSPECTED if may_become_slow(self._paces) else at_rest
        if suspect.ranks != self._suspected or self._suspicions == 1:
            self._suspected, self._own, self._theirs = suspect.ranks, [], []
        # To take stacks of a rank that has hardly any processor would slow it more, and tell nothing.
        has_processor = not lacks_processor(suspect, self._paces)
        if has_processor and (slow is None or not self._own):
            await self._take_stacks(suspect, pace)
        if slow is not None:
            self._report(slow, hosts)
            return at_rest
        return max(0.1, _EVERY_SUSPECTED - (time.monotonic() - began))

    def _by_own_clock(self, pace: HostPace, now: float) -> HostPace:
        """Return the pace of a host by the clock of this one: the host has told it between the request and now."""
        ahead = max(0.0, pace.time - now) + min(0.0, pace.time - self._sent)
        return with_clock(pace, ahead) if ahead else pace

    async def _take_stacks(self, suspect: Suspect, pace: Pace) -> None:
        """Take stacks of ranks that may be slow, and of those that have waited most for others, some times."""
        by_loss = sorted(pace.waits, key=lambda rank: pace.lost.get(rank, 0.0))
        suspects = (suspect.ranks or by_loss)[:_MAX_STACKS]
        others = [rank for rank in by_loss if rank not in suspect.ranks][:_MAX_STACKS] if suspect.ranks else []

        async def take(rank: int) -> list[ProcessStacks]:
            answers, _ = await self._hosts.collect(TakeStacks(rank, save_as=""), _STACKS_TIMEOUT, [rank])
            return [stacks for found in answers.values() for shared in found for stacks in shared.each_process()]

        for _ in range(_ROUNDS):
            taken = await asyncio.gather(*map(take, (*suspects, *others)))
            self._own += map(activity, filter(None, taken[: len(suspects)]))
            self._theirs += map(activity, filter(None, taken[len(suspects) :]))
            await asyncio.sleep(_ROUND_EVERY * random.uniform(0.5, 1.5))

    def _report(self, suspect: Suspect, hosts: Mapping[int, int]) -> None:
        attempt = self._members.attempt
        named = {rank: (replica, attempt.hosts[replica].host.hostname) for rank, replica in hosts.items()}
        found = explain(suspect, self._paces, self._own, self._theirs, named).shown(time.time())
        self._found, self._lost, self._suspicions = (suspect, found), found.lost, 0
        self._reporter.report("slow", found.message, attempt=attempt.number, slowness=dataclasses.asdict(found))
        if found.replica is not None and len(attempt.hosts) > 1 and found.kind in MACHINE_KINDS:
            node = attempt.hosts[found.replica].host.node
            self._reporter.record("node_fault", found.message, node=node, fault="slow")
        spec = self._hosts.spec
        if spec.on_slow:
            data = {"id": spec.app, **dataclasses.asdict(found)}
            self._hook = asyncio.ensure_future(self._run_hook(spec.on_slow, data))
        replaces = spec.slow_hosts == "replace" and found.kind in MACHINE_KINDS
        exclude = self._hosts.gatherer.exclude
        if replaces and found.replica is not None and (event := exclude(found.replica, found.message)):
            self._hosts.events.post(dataclasses.replace(event, saves=True))

    async def _run_hook(self, command: str, data: Mapping[str, object]) -> None:
        if failure := await asyncio.to_thread(run_hook, "on_slow", command, data, os.environ):
            self._reporter.report("on_slow", failure)

    def _follow(self, suspect: Suspect, found: Slowness, pace: Pace) -> None:
        """Report the end of a slowness once it is gone."""
        share = share_now(suspect, self._paces)
        self._lost += share * pace.seconds
        if not share:
            text = f"slow no more: {found.who()}; {show_duration(self._lost)} were lost"
            self._reporter.report("slow_end", text, attempt=self._members.attempt.number, lost=round(self._lost, 3))
            self._found = None
