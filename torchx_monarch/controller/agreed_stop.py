# SPDX-License-Identifier: BSD-3-Clause
"""Have all ranks of an attempt end their loops at the same step, before they are to end (``training.steps``)."""

from __future__ import annotations

from torchx_monarch.controller.elastic import listed
from torchx_monarch.controller.host_messages import HostError, StopAtStep
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight.rank_sample import StepsRead

_LAST_PART = 5.0
"""Seconds of the grace period, a fifth of it at most, that are left to ranks that get SIGTERM at the end."""


def seconds_to_stop(grace: float) -> float:
    """Return the seconds of the grace period in which ranks come to the step, save and end by themselves."""
    return grace - min(_LAST_PART, grace / 5)


class AgreedStop:
    """One agreed stop of the ranks of the hosts.

    Attributes:
        is_agreed: whether all ranks have been told to end at the step.
    """

    def __init__(self, hosts: JobHosts, seconds: float) -> None:
        self.is_agreed = False
        self._hosts = hosts
        self._seconds = seconds
        self._last: list[StepsRead] = []

    async def run(self) -> None:
        """Choose stop points that no rank has passed, until all ranks wait at one; then tell them to end there.

        The distance doubles each time, so that it exceeds what ranks do while hosts are asked.

        Raises:
            HostError: a host has not answered.
        """
        distance, target = 1, -1
        while target < 0 or not await self._all_wait_at(target):
            self._last = [*(await self._hosts.ask(StopAtStep(seconds=self._seconds))).values()]
            target = max(read.passed for read in self._last) + distance
            distance *= 2
        if any(read.running for read in self._last):  # else all have ended without it
            self._last = [*(await self._hosts.ask(StopAtStep(target, confirmed=True))).values()]
            self.is_agreed = True

    async def is_used(self) -> bool:
        """Return whether ranks have begun loops of ``steps``."""
        answers, _ = await self._hosts.collect(StopAtStep(), self._hosts.spec.lease)
        return any(answer.is_used for answer in answers.values())

    async def describe_left(self) -> str:
        """Return which ranks have not come to the step, or not ended after it; empty if their hosts do not say."""
        answers, _ = await self._hosts.collect(StopAtStep(), self._hosts.spec.lease)
        left = [found for answer in answers.values() for found in answer.left]
        if not left:
            return ""
        furthest_behind, _ = min(left)  # others may wait for it, as in a collective
        ranks = [rank for passed, rank in left if passed == furthest_behind]
        did = f"did not end after {self.step}" if self.is_agreed else "did not come to the step"
        return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} {did}"

    @property
    def step(self) -> str:
        """The last step that is done: ``step 8,412``; where loops do not count, how many are done: ``8,412 steps``."""
        furthest = max(self._last, key=lambda read: read.passed, default=StepsRead())
        return f"{furthest.done:,} steps" if furthest.step is None else f"step {furthest.step:,}"

    async def _all_wait_at(self, target: int) -> bool:
        """Return whether all ranks wait at a target, or else False as soon as one has passed it."""
        with self._hosts.call(StopAtStep(target)) as call:
            self._last = []
            async for _, answer in call:
                if isinstance(answer, HostError):
                    raise answer
                self._last.append(answer)
                if answer.passed > target:
                    return False
        return True
