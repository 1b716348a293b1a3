# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which host takes over a job, and which leader is obeyed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller import succession
from torchx_monarch.controller.host_events import HostPreempted, StopRequested
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.model.codec import DecodeError
from torchx_monarch.model.job_record import AttemptProgress, JobRecord, MachineFailures
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration
from torchx_monarch.transport import connections, local_addresses
from torchx_monarch.transport.connections import Address
from torchx_monarch.transport.local_addresses import NetworkOptions

PROGRESS = AttemptProgress(4, uncounted=1, restarts_left=2, rank_restarts=1, first_log_attempt=10, furthest_step=7)


@pytest.fixture
def address(leaves_nothing: None) -> Address:
    return Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))


def record(hosts: str, places: str = "", leader: int = 0, term: int = 0) -> JobRecord:
    return JobRecord(term, leader, tuple(map(int, hosts)), tuple(map(int, places)), PROGRESS)


def over_network(replica: int, listener: str) -> Registration:
    return dataclasses.replace(host(replica), listener=listener)


def host(replica: int) -> Registration:
    return Registration(replica, "here", 1, 1)


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


def test_a_record_of_thousands_of_hosts_is_short() -> None:
    hosts = tuple(range(1, 4096))
    job = JobRecord(0, 0, hosts, (4095, *range(1, 4095), 0), PROGRESS, ("tls:n1:1",), (0, *hosts))
    text = json.dumps(job.to_json())
    assert len(text) < 500 and JobRecord.from_json(json.loads(text)) == job


@pytest.mark.parametrize("hosts", [None, [1, 2], [[1, "2"]], [[0, 1 << 40]], [[0, 1 << 19]] * 3, [[1]], [[True, 1]]])
def test_a_record_that_is_damaged_is_refused(hosts: object) -> None:
    with pytest.raises(DecodeError):
        JobRecord.from_json({**record("12").to_json(), "hosts": hosts})


def test_where_a_leader_listens() -> None:
    here, there = Address("unix", path="/run/r.sock"), Address("tls", "n1", 26599)
    assert succession.listener_of(here, 0) == here
    assert succession.listener_of(here, 2).path == "/run/r.sock.2"
    assert succession.listener_of(there, 0) == there
    assert succession.listener_of(there, 1, "tls:n2:4711") == Address("tls", "n2", 4711)
    job = dataclasses.replace(record("12"), listeners=("tls:n2:1", "tls:n3:2"), voters=(0, 1, 2))
    assert succession.listeners(job) == {1: "tls:n2:1", 2: "tls:n3:2"}
    assert succession.listeners(record("12")) == {}
    assert succession.without_leader(job).voters == (1, 2)


@pytest.mark.parametrize(("own", "other", "deposed"), [(0, 0, False), (0, 1, True), (2, 1, False), (1, 3, True)])
def test_a_leader_ends_when_there_is_a_later_one(own: int, other: int, deposed: bool) -> None:
    assert bool(succession.why_deposed(own, other)) is deposed


def test_hosts_know_the_job_and_obey_the_latest_leader_only(address: Address) -> None:
    async def main() -> None:
        first = Rendezvous(address, 3, fewest=1, hands_over=True)
        await first.start()
        first.register(host(0))
        follower = await RendezvousClient.join(address, host(1), WITHIN)
        waiting = asyncio.ensure_future(follower.result())
        await first.record.publish((0, 1), PROGRESS)
        late = await RendezvousClient.join(address, host(2), WITHIN)
        also = asyncio.ensure_future(late.result())
        await until_async(
            lambda: follower.job is not None and late.job is not None and follower.job.hosts == (1, 2), "the record"
        )
        assert follower.job == late.job == JobRecord(0, 0, (1, 2), (0, 1), PROGRESS)

        # Host 1 takes over: clients find it at replica 0's address.
        second = Rendezvous(address, 3, fewest=1, leader=1, term=1, absent={0}, hands_over=True)
        await second.start()
        second.register(host(1))
        joined = await RendezvousClient.join(address, host(2), WITHIN)
        with pytest.raises(RendezvousError, match="taken over the job"):
            await RendezvousClient.join(address, host(0), WITHIN)
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


@pytest.mark.parametrize(
    ("fewest", "published", "leaving", "handed_over"),
    [(1, True, (), True), (2, True, (), True), (3, True, (), False), (2, True, (2,), False), (1, False, (), False)],
)
def test_a_preempted_leader_hands_over_to_enough_hosts_that_stay(
    address: Address, fewest: int, published: bool, leaving: Sequence[int], handed_over: bool
) -> None:
    async def main() -> None:
        leader = Rendezvous(address, 3, fewest=fewest, hands_over=True)
        for replica in range(3):
            leader.register(host(replica))
        if published:
            await leader.record.publish((0, 1, 2), PROGRESS)
        for replica in leaving:
            leader.events.post(HostPreempted(replica, JobResult(143, "preempted", stopped=True, replica=replica)))
        assert await leader.hand_over("preempted") is handed_over is leader.handed_over

    asyncio.run(main())


def test_a_follower_learns_that_the_leader_leaves(address: Address) -> None:
    async def main() -> None:
        leader = Rendezvous(address, 2, fewest=1, hands_over=True)
        await leader.start()
        leader.register(host(0))
        follower = await RendezvousClient.join(address, host(1), WITHIN)
        waiting = asyncio.ensure_future(follower.result())
        progress = dataclasses.replace(PROGRESS, failures=(MachineFailures("node7", (1.5, 2.5), True),))
        await leader.record.publish((0, 1), progress)
        assert await leader.hand_over("preempted: SIGTERM")
        assert await waiting is None and follower.left and await follower.leader_has_ended()
        assert follower.lost.endswith("leaves the job to another host: preempted: SIGTERM")
        assert follower.job == JobRecord(0, 0, (1,), (0, 1), progress)
        follower._writer.close()
        await leader.announce(JobResult(143, "preempted", stopped=True), 5)

    asyncio.run(main())


def test_a_leader_over_a_network_ends_with_fewer_than_half_of_the_hosts() -> None:
    async def main() -> None:
        with local_addresses.bind_port(NetworkOptions("127.0.0.1")) as probe:
            address = Address("insecure-tcp", "127.0.0.1", probe.getsockname()[1])
        leader = Rendezvous(address, 5, bind="127.0.0.1", fewest=1, hands_over=True)
        await leader.start()
        leader.register(host(0))
        others = [
            await RendezvousClient.join(address, over_network(replica, f"insecure-tcp:127.0.0.1:{replica}"), WITHIN)
            for replica in (1, 2, 3)
        ]
        waiting = [asyncio.ensure_future(each.result()) for each in others]
        await leader.record.publish((0, 1, 2, 3), PROGRESS)
        await until_async(lambda: all(each.job is not None for each in others), "the record")
        job = others[0].job
        assert job is not None and (job.hosts, job.voters) == ((1, 2, 3), (0, 1, 2, 3))
        assert job.listeners == tuple(f"insecure-tcp:127.0.0.1:{replica}" for replica in (1, 2, 3))
        with pytest.raises(RendezvousError, match="up to record 0, and this host up to record 5"):
            await RendezvousClient.join(address, host(4), WITHIN, generation=5)

        async def lose(replica: int, ended: bool) -> bool:
            writer = others[replica - 1]._writer
            writer.close() if ended else connections.give_up(writer)
            await until_async(lambda: replica not in leader.hosts.registered, f"the loss of host {replica}")
            await asyncio.sleep(0)
            return any(isinstance(event, StopRequested) for event in leader.events.pending)

        assert not await lose(1, ended=True)
        assert not await lose(2, ended=False)  # two of three may live, this one among them
        assert await lose(3, ended=False)
        assert not await others[0].leader_has_ended()  # it listens
        await leader.announce(JobResult(1, "over"), 60)
        for task in waiting:
            task.cancel()

        successor = Rendezvous(address, 4, leader=1, term=1, hands_over=True, before=job, reserved=None)
        successor.register(host(1))
        assert "1 of the 4 hosts" in await successor.gather_majority(0.1)
        for replica in (2, 3):
            successor.register(host(replica))
        assert await successor.gather_majority(5) == ""

    asyncio.run(main())
