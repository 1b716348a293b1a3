# SPDX-License-Identifier: BSD-3-Clause
"""Events of hosts: pending until they are settled, and what they interrupt."""

from __future__ import annotations

import asyncio
import signal

import pytest

from torchx_monarch.controller.host_events import (
    Changes,
    HostEvents,
    HostLost,
    HostPreempted,
    StopRequested,
    signalled,
)
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult

HOST = Registration(1, "node7", 4711)
LOST = HostLost(1, JobResult(1, "lost"))


def test_an_event_ends_all_work_until_it_is_settled() -> None:
    async def main() -> None:
        events, ended = HostEvents(), list[str]()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                ended.append("work")

        working = asyncio.ensure_future(events.until_event(work()))
        await asyncio.sleep(0)
        events.post(LOST)
        assert await working is LOST and ended == ["work"]
        assert await events.until_event(asyncio.sleep(60)) is LOST
        events.remove(LOST)
        assert not events.pending
        assert await events.until_event(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(asyncio.TimeoutError):
            await events.until_event(work(), seconds=0.01)
        assert ended == ["work", "work"]

    asyncio.run(main())


def test_a_condition_that_held_was_met_even_if_it_lapses_at_once() -> None:
    async def main() -> None:
        changes, present = Changes(), [False]
        waiting = asyncio.ensure_future(changes.until(lambda: present[0], 300))
        for _ in range(3):  # it waits
            await asyncio.sleep(0)
        present[0] = True
        changes.notify()
        for _ in range(2):  # it is awake, and has not returned before Python 3.12
            await asyncio.sleep(0)
        present[0] = False
        assert await waiting

    asyncio.run(main())


def test_the_outcome_of_what_is_done_already_comes_before_an_event() -> None:
    async def main() -> None:
        events, done = HostEvents(), asyncio.get_running_loop().create_future()
        done.set_result(7)
        events.post(LOST)
        assert await events.until_event(done) == 7
        assert [*events.pending] == [LOST]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("number", "announced", "kind", "reason"),
    [
        (signal.SIGTERM, False, HostPreempted, "preempted: host 1 (node7, pid 4711) received SIGTERM"),
        (signal.SIGTERM, None, HostPreempted, "preempted or cancelled: host 1 (node7, pid 4711) received SIGTERM"),
        (signal.SIGTERM, True, StopRequested, "host 1 was told to stop by signal 15 (SIGTERM)"),
        (signal.SIGINT, False, StopRequested, "host 1 was told to stop by signal 2 (SIGINT)"),
    ],
)
def test_the_meaning_of_a_signal(number: int, announced: bool | None, kind: type, reason: str) -> None:
    event = signalled(HOST, number, announced)
    assert (type(event), event.replica, event.signal, event.result.code) == (kind, 1, number, 128 + number)
    assert event.result.stopped and event.result.reason == reason, "it says nothing about the sender, who may be a rank"
