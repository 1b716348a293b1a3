# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which host takes over a job, and which leader is obeyed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchx_monarch.controller import succession
from torchx_monarch.controller.host_events import StopRequested
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.model.job_record import AttemptProgress, JobRecord
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration
from torchx_monarch.transport.connections import Address

PROGRESS = AttemptProgress(4, uncounted=1, restarts_left=2, rank_restarts=1, first_log_attempt=10, furthest_step=7)


@pytest.fixture
def address(leaves_nothing: None) -> Address:
    return Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))


def record(hosts: str, places: str = "", leader: int = 0, term: int = 0) -> JobRecord:
    return JobRecord(term, leader, tuple(map(int, hosts)), tuple(map(int, places)), PROGRESS)


def host(replica: int) -> Registration:
    return Registration(replica, "ipc:///nowhere", "here", 1, 1)


@pytest.mark.parametrize(
    ("job", "found"),
    [
        (record("123"), [(1, 1), (2, 2), (3, 3)]),
        # Terms grow from leader to leader, and every successor has one of its own.
        (record("3", leader=2, term=2), [(3, 3)]),
        (record(""), []),
        (record("123456789"), [(each, each) for each in range(1, 9)]),
    ],
)
def test_successors(job: JobRecord, found: Sequence[tuple[int, int]]) -> None:
    assert succession.successors(job) == found


@pytest.mark.parametrize(
    ("hosts", "fewest", "enough"), [("1", 1, True), ("1", 2, False), ("12", 2, True), ("", 1, False)]
)
def test_hosts_that_suffice(hosts: str, fewest: int, enough: bool) -> None:
    assert succession.suffice(record(hosts), fewest) is enough


@pytest.mark.parametrize(
    ("job", "leader", "places"),
    [
        # The new leader has the first place; a spare host fills the one that it leaves.
        (record("123", "012"), 1, [1, 0, 2]),
        (record("123", "012"), 3, [3, 1, 2]),  # it was the spare host
        (record("23", "132", leader=1, term=1), 2, [2, 3, 1]),
    ],
)
def test_places_under_a_new_leader(job: JobRecord, leader: int, places: list[int]) -> None:
    assert succession.places(job, leader) == places


@pytest.mark.parametrize(
    ("hosts", "leader", "absent"), [("123", 1, {0}), ("123", 2, {0, 1}), ("13", 1, {0, 2}), ("3", 3, {0, 1, 2})]
)
def test_hosts_that_a_new_leader_does_not_wait_for(hosts: str, leader: int, absent: set[int]) -> None:
    assert succession.absent(record(hosts), leader, 4) == absent


@pytest.mark.parametrize(("own", "other", "deposed"), [(0, 0, False), (0, 1, True), (2, 1, False), (1, 3, True)])
def test_a_leader_ends_when_there_is_a_later_one(own: int, other: int, deposed: bool) -> None:
    assert bool(succession.why_deposed(own, other)) is deposed


def test_hosts_know_the_job_and_obey_the_latest_leader_only(address: Address) -> None:
    async def main() -> None:
        first = Rendezvous(address, 3, fewest=1, hands_over=True)
        await first.start()
        first.register(host(0))
        follower = await RendezvousClient.join(address, host(1), 5)
        waiting = asyncio.ensure_future(follower.result())
        await first.publish((0, 1), PROGRESS)
        late = await RendezvousClient.join(address, host(2), 5)
        also = asyncio.ensure_future(late.result())
        while follower.job is None or late.job is None or follower.job.hosts != (1, 2):
            await asyncio.sleep(0.01)
        assert follower.job == late.job == JobRecord(0, 0, (1, 2), (0, 1), PROGRESS)

        # Host 1 takes over: clients find it at replica 0's address.
        second = Rendezvous(address, 3, fewest=1, leader=1, term=1, absent={0}, hands_over=True)
        await second.start()
        second.register(host(1))
        joined = await RendezvousClient.join(address, host(2), 5)
        with pytest.raises(RendezvousError, match="taken over the job"):
            await RendezvousClient.join(address, host(0), 5)
        # A leader of a term before that of its peer is refused, and ends.
        with pytest.raises(RendezvousError, match="term 7"):
            await RendezvousClient.join(address, host(2), 0.3, term=7)
        assert any(isinstance(event, StopRequested) for event in second.events.pending)
        for task in (waiting, also):
            task.cancel()
        for each in (follower, late, joined):
            each._writer.close()
        for leader in (first, second):
            await leader.announce(JobResult(0, "done"), 60)
            assert Path(address.path).exists() is (leader is first)  # the other leader's socket stays

    asyncio.run(main())
