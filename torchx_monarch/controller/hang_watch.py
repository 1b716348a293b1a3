# SPDX-License-Identifier: BSD-3-Clause
"""Watch the ranks of an attempt for hangs: ranks that wait for one in a collective, or inside the kernel.

It asks the hosts, for the watch over what slows the ranks, too (``SlowWatch``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import traceback
from collections.abc import Iterator, Mapping

from torchx_monarch.controller.host_messages import ReadCollectives, TakeStacks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.slow_watch import FIRST_PACE, SlowWatch
from torchx_monarch.insight.hangs import Fault, Hang, HostCollectives, describe_places, diagnose
from torchx_monarch.insight.stacks import ProcessStacks, ranges, rank_ranges

_LOOKS = 10
"""Looks within the seconds after which ranks hang. A wait that may become a hang is looked at when it does."""

_SHORTEST = 1.0
"""Seconds between two looks."""


class HangWatch:
    """Find ranks that hang, report them, and say whether they are to be stopped."""

    def __init__(self, hosts: JobHosts) -> None:
        self._hosts = hosts
        self._members = hosts.members
        self._slow_watch = SlowWatch(hosts)
        self._reporter = hosts.reporter
        self._rests = 0
        self._since = 0.0
        self._reported: Hang | None = None
        self._is_quiet = False
        self._found_at = 0.0

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """Find no hangs within this context, as while a debugger is attached; waits count from its end on."""
        self._rests += 1
        try:
            yield
        finally:
            self._rests -= 1
            self._slow_watch.begin()
            self._since = asyncio.get_running_loop().time()

    async def run(self, kernel_timeout: float = 0.0) -> Hang:
        """Watch the ranks of an attempt until this task is cancelled; return a hang because of which they must end.

        So must ranks that wait inside the kernel for ``kernel_timeout`` seconds; 0 for no limit.
        """
        loop, slow_watch = asyncio.get_running_loop(), self._slow_watch
        hang_after = self._hosts.spec.hang_after or math.inf
        kernel_after = min(hang_after, kernel_timeout or math.inf)
        every = max(_SHORTEST, kernel_after / _LOOKS)
        self._since, self._reported, pause, failure = loop.time(), None, every, ""
        self._is_quiet = False
        slow_watch.begin()
        slow_at = self._since + FIRST_PACE
        while True:
            await asyncio.sleep(max(0.0, min(pause, slow_at - loop.time())))
            asks_pace = loop.time() >= slow_at
            slow_at = loop.time() + FIRST_PACE if asks_pace else slow_at
            if self._rests:
                continue
            pause = every
            try:
                answers = await self._read(slow_watch.request() if asks_pace else ReadCollectives(details=False))
                if asks_pace:
                    slow_at = await slow_watch.observe(answers) + loop.time()
                longest, in_kernel, quiet = self._longest(answers)
                left = min(hang_after - longest, kernel_after - in_kernel)
                hang = await self._diagnosed(hang_after, kernel_after) if left <= 0 else None
                hang = await self._compare(hang)
                await self._report_quiet(quiet if hang is None else 0.0, hang_after)
                left = min(left, hang_after - quiet)
                pause = min(every, left + 0.05) if left > 0 else every
            except Exception as error:
                traceback.print_exc()  # into Monarch's log
                if failure != (failure := f"{type(error).__name__}: {error}"):
                    self._reporter.line(f"the watch for hangs goes on after an error: {failure}")
                continue
            if hang is not None and (self._hosts.spec.on_hang != "observe" or 0 < kernel_timeout <= in_kernel):
                return hang

    async def _compare(self, hang: Hang | None) -> Hang | None:
        """Report a hang that is not known, and the end of the known one; return the hang with its place."""
        reported, now = self._reported, asyncio.get_running_loop().time()
        if hang is not None and not hang.same_as(reported):
            hang = await self._report(hang)
            self._found_at = now if reported is None else self._found_at
        if reported is not None and hang is None:
            what = "waited inside the kernel" if reported.fault is Fault.KERNEL else "made the others wait"
            waited = now - self._found_at + reported.seconds
            text = f"hang over: {rank_ranges(reported.ranks)} {what} for {waited:.0f} s"
            self._reporter.report("hang_end", text, attempt=self._members.attempt.number, waited=round(waited, 3))
        # Keep the one that was reported, with the time that its ranks had waited then.
        self._reported = reported if hang is not None and hang.same_as(reported) else hang
        return self._reported

    async def _read(self, request: ReadCollectives) -> dict[int, HostCollectives]:
        """Return the answers of all hosts; nothing if one is missing, or the watch rests."""
        answers, missing = await self._hosts.collect(request)
        return {} if missing or self._rests else answers

    def _longest(self, answers: Mapping[int, HostCollectives]) -> tuple[float, float, float]:
        """Return the longest wait in a collective and inside the kernel, and for how long no rank has done anything."""
        found, at_most = answers.values(), self._at_most()
        longest = max((answer.longest_wait for answer in found), default=0.0)
        in_kernel = max((answer.kernel_wait for answer in found), default=0.0)
        quiet = min((answer.quiet for answer in found if answer.quiet is not None), default=0.0)
        return min(longest, at_most), min(in_kernel, at_most), min(quiet, at_most)

    async def _report_quiet(self, seconds: float, hang_after: float) -> None:
        """Report once where all ranks are that have printed and called nothing, as when each waits to receive."""
        was_quiet, self._is_quiet = self._is_quiet, seconds >= hang_after
        if self._is_quiet and not was_quiet:
            stacks = await self._take_stacks("while ranks are quiet")
            places = describe_places([process.rank for process in stacks], stacks)
            text = f"no rank has called a collective or printed anything for {seconds:.0f} s; {places}"
            self._reporter.report(
                "quiet",
                f"{text} (torchx monarch stacks)",
                attempt=self._members.attempt.number,
                quiet=round(seconds, 3),
            )

    async def _diagnosed(self, hang_after: float, kernel_after: float) -> Hang | None:
        answers, missing = await self._hosts.collect(ReadCollectives(details=True))
        if missing or self._rests:
            return None
        at_most = self._at_most()

        def decide() -> Hang | None:
            ranks = [rank for answer in answers.values() for rank in answer.ranks()]
            return diagnose(ranks, hang_after, at_most, kernel_after)

        return await asyncio.to_thread(decide)  # which takes more than a second with 65,536 ranks

    def _at_most(self) -> float:
        return asyncio.get_running_loop().time() - self._since

    async def _take_stacks(self, save_as: str) -> list[ProcessStacks]:
        answers = await self._hosts.collect_shared(TakeStacks(None, save_as), afresh=True)
        return [stacks for shared in itertools.chain(*answers.by_replica.values()) for stacks in shared.each_process()]

    async def _report(self, hang: Hang) -> Hang:
        stacks = await self._take_stacks("while ranks hang")
        hang = dataclasses.replace(hang, place=describe_places(hang.ranks, stacks))
        self._reporter.report(
            "hang",
            f"hang: {hang.describe()}",
            reason=hang.describe(),
            attempt=self._members.attempt.number,
            fault=hang.fault.value,
            ranks=ranges(hang.ranks),
            waiting=ranges(hang.waiting),
            group=hang.group,
            operation=hang.collective.name,
            number=hang.collective.number,
            waited=round(hang.seconds, 3),
            place=hang.place,
        )
        return hang
