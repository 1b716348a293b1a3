# SPDX-License-Identifier: BSD-3-Clause
"""Ranks end their loops at one step, whatever the order in which they, their hosts and the controller go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import torchx_monarch as tm
from tests.waits import WITHIN, until
from torchx_monarch.controller.agreed_stop import AgreedStop
from torchx_monarch.controller.host_messages import HostCall, Request, StopAtStep
from torchx_monarch.host.ranks import step_memory
from torchx_monarch.host.ranks.step_memory import StepMemory
from torchx_monarch.insight.rank_sample import Progress
from torchx_monarch.training import steps

TARGET, CONFIRMED, PASSED, WAITS_AT = steps.TARGET, steps.CONFIRMED, steps.PASSED, steps.WAITS_AT


class FakeHosts:
    """Hosts without connections, each with the memory of its ranks."""

    spec = SimpleNamespace(lease=WITHIN)

    def __init__(self, ranks_of_hosts: list[int], delay: Callable[[], int] = lambda: 0) -> None:
        self.memories = [StepMemory(count, 0.0) for count in ranks_of_hosts]
        self._delay = delay
        self.ranks: list[list[Any]] = []
        for count in ranks_of_hosts:
            first = sum(map(len, self.ranks))
            self.ranks.append([SimpleNamespace(rank=first + k, local_rank=k, is_running=True) for k in range(count)])

    def close(self) -> None:
        for memory in self.memories:
            memory.close()

    def slots(self) -> list[Any]:
        """The memory of each rank, as its program has it."""
        opened = [
            steps._open(memory.variable(rank.local_rank))
            for memory, ranks in zip(self.memories, self.ranks, strict=True)
            for rank in ranks
        ]
        assert None not in opened
        return opened

    async def ask(self, request: StopAtStep) -> dict[int, Any]:
        with self.call(request) as call:
            return {replica: answer async for replica, answer in call}

    async def collect(self, request: StopAtStep, _: float) -> tuple[dict[int, Any], dict[int, str]]:
        return await self.ask(request), {}

    @contextlib.contextmanager
    def call(self, request: Request[Any]) -> Iterator[HostCall[Any]]:
        call = HostCall(0, request, range(len(self.memories)))
        assert isinstance(request, StopAtStep)

        async def execute(replica: int) -> None:
            for _ in range(self._delay()):
                await asyncio.sleep(0)
            call.put(replica, await self.memories[replica].stop(self.ranks[replica], **vars(request)))

        tasks = [asyncio.ensure_future(execute(replica)) for replica in range(len(self.memories))]
        try:
            yield call
        finally:
            for task in tasks:
                task.cancel()


def model_rank(memory: Any, buffer: list[tuple[int, int]]) -> Iterator[bool]:
    """Take the steps of ``Steps`` one access to memory after the other; yield False within a step, True at its end.

    What it writes waits in the buffer, which the processor empties at any time: it may read before its writes are seen.
    """
    passed = 0
    while True:
        while (target := memory[TARGET]) == passed:
            yield False
            if memory[CONFIRMED] == target:
                return
            buffer.append((WAITS_AT, target))
            yield False
        yield False
        passed += 1
        buffer.append((PASSED, passed))
        yield True


def interleave(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop ranks of unequal speed, which may wait for each other after each step; return their last positions."""
    chance = random.Random(seed)
    monkeypatch.setattr(step_memory, "_POLL", 0)
    hosts = FakeHosts([chance.randint(1, 3) for _ in range(chance.randint(1, 3))], lambda: chance.randrange(6))
    slots = hosts.slots()
    buffers: list[list[tuple[int, int]]] = [[] for _ in slots]
    ranks = [model_rank(memory, buffer) for memory, buffer in zip(slots, buffers, strict=True)]
    speeds = [chance.choice((0.2, 1.0, 1.0, 5.0)) for _ in ranks]
    steps_done = [0] * len(ranks)
    most_ahead = chance.choice((0, 0, 1, 1 << 30))  # how far ranks may be ahead of others, as in collectives

    async def run_ranks() -> None:
        running = set(range(len(ranks)))
        while running:
            for _ in range(chance.randrange(12)):
                rank = chance.choices(range(len(ranks)), speeds)[0]
                if buffers[rank] and chance.random() < 0.3:
                    field, value = buffers[rank].pop(0)
                    slots[rank][field] = value
                elif rank in running and steps_done[rank] <= min(steps_done) + most_ahead:
                    at_end = next(ranks[rank], None)
                    if at_end is None:
                        running.discard(rank)
                    steps_done[rank] += bool(at_end)
            await asyncio.sleep(0)

    async def main() -> None:
        running = asyncio.ensure_future(run_ranks())
        for _ in range(chance.randrange(50)):
            await asyncio.sleep(0)
        stop = AgreedStop(hosts, 0.0)  # type: ignore[arg-type]
        await asyncio.wait_for(stop.run(), WITHIN)
        assert stop.is_agreed
        await asyncio.wait_for(running, WITHIN)

    asyncio.run(main())
    for rank, buffer in enumerate(buffers):
        for field, value in buffer:
            slots[rank][field] = value
    hosts.close()
    return [memory[PASSED] for memory in slots]


@pytest.mark.parametrize(
    "seeds",
    [range(60), pytest.param(range(60, 3000), marks=pytest.mark.nightly("minutes; the first are tried every time"))],
    ids=["first", "all"],
)
def test_all_ranks_end_at_one_step_in_any_order(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        assert len(set(interleave(seed, monkeypatch))) == 1, seed


def run_threads(hosts: FakeHosts, loop: Callable[[Any, int, list[int]], None]) -> tuple[AgreedStop, list[list[int]]]:
    """Run a loop in a thread for each rank, stop them while they run; what they have done."""
    slots = hosts.slots()
    done: list[list[int]] = [[] for _ in slots]
    threads = [
        threading.Thread(target=loop, args=(slot, rank, done[rank]), daemon=True) for rank, slot in enumerate(slots)
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(done), "the first steps")
    stop = AgreedStop(hosts, 100.0)  # type: ignore[arg-type]

    async def main() -> None:
        assert await stop.is_used()
        await asyncio.wait_for(stop.run(), WITHIN)

    asyncio.run(main())
    for thread in threads:
        thread.join(WITHIN)
    hosts.close()
    return stop, done


def test_programs_of_unequal_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    local = threading.local()
    monkeypatch.setattr(steps, "_memory", lambda: local.memory)

    def loop(memory: Any, rank: int, done: list[int]) -> None:
        local.memory = memory
        for epoch in range(1 << 30):  # several loops, one after the other
            loop = tm.steps(range(epoch * 10, epoch * 10 + 10))
            assert len(loop) == 10
            for step in loop:
                time.sleep(0.0005 * rank)
                done.append(step)
            if loop.stopped:
                break
        assert list(tm.steps([1, 2])) == [] and 0 < (tm.time_left() or 0) <= 100

    stop, done = run_threads(FakeHosts([2, 1]), loop)
    assert done[0] == done[1] == done[2] == list(range(len(done[0])))
    assert stop.step == f"step {done[0][-1]:,}"


def test_without_hosts_the_loop_is_that_of_what_it_is_given() -> None:
    code = "import torchx_monarch as tm; print(*tm.steps('abc'), tm.time_left(), tm.steps([]).stopped)"
    for value in ("", "/proc/1/fd/0:x", "/proc/self/fd/0:0", f"{__file__}:0"):
        environ = {**os.environ, steps.VARIABLE: value}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=WITHIN)
        assert done.stdout == "a b c None False\n", done.stderr


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepMemory]:
    """The memory of one rank, as which this process loops."""
    memory = StepMemory(1, time.time() + 50)
    monkeypatch.setattr(steps, "_opened", [steps._open(memory.variable(0))])
    yield memory
    memory.close()


def test_no_item_is_taken_that_is_not_used(memory: StepMemory) -> None:
    taken: list[str] = []

    def items() -> Iterator[str]:
        for item in "abcdef":
            taken.append(item)
            yield item

    slot = steps._memory()
    assert slot is not None
    slot[TARGET] = slot[CONFIRMED] = 2  # at the beginning, and after each step
    assert list(tm.steps(items())) == taken == ["a", "b"] and memory.progress(0, None, 1e10) is None
    assert 0 < (tm.time_left() or 0) <= 50


@pytest.mark.parametrize(
    ("ranges", "first", "last"),
    [
        ([range(7, 7)], None, None),
        ([range(7, 17)], 7, 16),
        ([range(7, 17), range(17, 20)], 7, 19),
        ([range(5), range(5)], None, None),  # the steps of epochs
        ([range(5), "abc"], None, None),
        ([range(0, 10, 2)], None, None),
        ([range(-3, 3)], None, None),
    ],
    ids=str,
)
def test_what_a_host_knows_of_the_steps(
    memory: StepMemory, ranges: list[Any], first: int | None, last: int | None
) -> None:
    for items in ranges:
        assert len(list(tm.steps(items))) == len(items)
    steps.checkpointed(12)
    now = time.time()
    found = memory.progress(0, None, now)
    assert (found and found.first_step, found and found.step, found and found.checkpoint) == (
        (None, None, None) if first is None else (first, last, 12)
    )
    reported = Progress(3, None, now, checkpoint=1, checkpoint_time=now - 100)
    merged = memory.progress(0, reported, now)
    assert (
        merged is not None and (merged.step, merged.checkpoint) == (3, 12) and now - 9 < merged.checkpoint_time <= now
    )


def test_a_step_that_has_not_ended_is_not_done(memory: StepMemory) -> None:
    for step in tm.steps(range(100, 110)):
        if step == 104:
            break
    found = memory.progress(0, None, 1e10)
    assert found is not None and (found.first_step, found.step) == (100, 103)


def test_what_ranks_write_does_no_harm() -> None:
    hosts = FakeHosts([2])
    first, second = hosts.slots()
    for field in range(4, steps.FIELDS):
        first[field], second[field] = -5, (1 << 63) - 1
    read = asyncio.run(hosts.ask(StopAtStep()))[0]
    assert (read.passed, read.step, read.running, read.left) == (1 << 60, None, 2, ((0, 0), (1 << 60, 1)))
    second[steps.FIRST], second[steps.CHECKPOINT] = 8, 9
    reported = Progress(3, None, 200.0)
    found = [hosts.memories[0].progress(rank, reported, 300.0) for rank in (0, 1)]
    assert found == [reported, replace(reported, checkpoint=8, checkpoint_time=300.0)]
    os.truncate(hosts.memories[0].variable(0).rpartition(":")[0], 3)
    assert not hosts.memories[0].is_used and hosts.memories[0].progress(1, None, 9.0) is None
    assert asyncio.run(hosts.ask(StopAtStep()))[0].passed == 0
    hosts.close()
