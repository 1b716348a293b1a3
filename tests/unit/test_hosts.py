# SPDX-License-Identifier: BSD-3-Clause
"""Requests reach replica 0's host directly, and other hosts over the connections of their registrations, as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller import hosts as hosts_module
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_events import HostLost
from torchx_monarch.controller.host_messages import (
    BeginRun,
    HostCall,
    HostError,
    HostRefused,
    ProbeFile,
    Request,
    SampleRanks,
    TakeStacks,
    WatchRanks,
    decode_report,
    decode_request,
)
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.members import MemberState
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.codec import DecodeError
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.world import HostRange, World
from torchx_monarch.system.console import Console
from torchx_monarch.transport import messages
from torchx_monarch.transport.address import Address

REPLICAS = 3
HOSTS = [Registration(replica, f"node{replica}", 7) for replica in range(REPLICAS)]


class Replica:
    """The other side of a host: its connection, and the requests that it has got and that were cancelled.

    It answers when the test says what.
    """

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.asked: list[Request[Any]] = []
        self.cancelled: list[Request[Any]] = []
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.client: RendezvousClient

    async def follow(self, address: Address) -> None:
        self.client = await RendezvousClient.join(HostNetwork(address), HOSTS[self.replica], WITHIN)
        await self.client.result(self.handle)
        self.client._channel.close()

    async def handle(self, request: Request[Any]) -> Any:
        self.asked.append(request)
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[tuple[JobHosts, list[Replica], Rendezvous]]:
    """Replica 0 and two hosts that have registered with it over a socket file."""
    address = Address("unix", path=str(folder / "r.sock"))
    rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=REPLICAS, host_timeout=1.0)))
    await rendezvous.start()
    rendezvous.register(HOSTS[0])
    replicas, following = [Replica(number) for number in range(REPLICAS)], list[asyncio.Task[None]]()
    for replica in replicas[1:]:
        following.append(asyncio.ensure_future(replica.follow(address)))
    await rendezvous.members.until(lambda: rendezvous.members.able_count == REPLICAS)
    reporter = Reporter(Console(2), None, "trainer")
    hosts = JobHosts(rendezvous, NodeRange(3, 3, 1.0), reporter, replicas[0].handle)
    rendezvous.members.form(rendezvous.members.able)
    try:
        yield hosts, replicas, rendezvous
    finally:
        for replica in replicas:
            replica.answer.cancel()
        await rendezvous.announce(JobResult(0, ""), WITHIN)
        await asyncio.wait(following)


def run(folder: Path, scenario: Callable[[JobHosts, list[Replica], Rendezvous], Awaitable[None]]) -> None:
    async def main() -> None:
        async with joined(folder) as (hosts, replicas, rendezvous):
            await scenario(hosts, replicas, rendezvous)

    asyncio.run(asyncio.wait_for(main(), WITHIN))


def test_a_request_that_is_too_large_is_the_failure_of_that_request_alone(tmp_path: Path) -> None:
    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        replicas[1].answer.set_result(True)
        with pytest.raises(HostError, match="^host 1 cannot be asked: a message of 8388"):
            await hosts.ask_host(ProbeFile("x" * messages.MAX_MESSAGE), 1)
        assert await hosts.ask_host(ProbeFile("x"), 1)

    run(tmp_path, scenario)


def test_a_host_that_does_not_answer_in_time_is_named_and_its_request_cancelled(tmp_path: Path) -> None:
    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        for replica in replicas[:2]:
            replica.answer.set_result("")
        answers, missing = await hosts.collect(SampleRanks(), 1.5)
        assert answers == {0: "", 1: ""}
        assert missing == {2: "no answer within 1.5 s"}
        await until_async(lambda: replicas[2].cancelled == [SampleRanks()], "the cancellation")

    run(tmp_path, scenario)


def test_answers_are_shared_by_all_who_ask_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "_SHARED_FOR", 2 * WITHIN)

    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        asking = [asyncio.ensure_future(hosts.collect_shared(TakeStacks(None))) for _ in range(3)]
        await until_async(lambda: all(replica.asked for replica in replicas), "the first requests")
        for replica in replicas:
            replica.answer.set_result([])
        first, *others = await asyncio.gather(*asking, hosts.collect_shared(TakeStacks(None)))
        assert first.by_replica == {0: [], 1: [], 2: []} and all(answers is first for answers in others)
        assert [len(replica.asked) for replica in replicas] == [1, 1, 1]
        # That of the watch for hangs, which is also saved, is always made, and then the answer to clients.
        saved = await hosts.collect_shared(TakeStacks(None, "while ranks hang"), afresh=True)
        assert saved is not first and await hosts.collect_shared(TakeStacks(None)) is saved
        hosts.members.attempt.world = World(0, 0, 0, (HostRange(0, 3, 8),), "", 0, False, "")
        found = await hosts.collect_shared(TakeStacks(8), [8])  # its host alone is asked
        assert found.by_replica == {1: []} and not found.missing
        found = await hosts.collect_shared(TakeStacks(24), [24])  # there is no such rank, as each host says
        assert [*found.by_replica] == [0, 1, 2]
        rendezvous.members.form(rendezvous.members.able)  # the ranks of another attempt
        monkeypatch.setattr(hosts_module, "_SHARED_FOR", 0.0)
        await hosts.collect_shared(TakeStacks(None))
        await asyncio.sleep(0.01)
        await hosts.collect_shared(TakeStacks(None))
        assert [len(replica.asked) for replica in replicas] == [5, 6, 5]

    run(tmp_path, scenario)


def test_a_request_to_all_hosts_has_a_time_out(tmp_path: Path) -> None:
    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        replicas[1].answer.set_result([])
        with pytest.raises(HostError, match=r"^host 0, 2: no answer within 1\.5 s to WatchRanks$"):
            await hosts.ask(WatchRanks(), 1.5)  # host 1 answers before, also on a busy machine

    run(tmp_path, scenario)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_host_whose_ranks_do_not_stop_is_lost_for_that_reason(tmp_path: Path, replica: int) -> None:
    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        for other in replicas:
            other.answer.set_result([])
        replicas[replica].answer = asyncio.get_running_loop().create_future()
        replicas[replica].answer.set_exception(HostRefused("host", "not even SIGKILL ends pid 9"))
        await hosts.stop(signal.SIGTERM, 0.0)
        [lost] = rendezvous.events.pending
        reason = f"host {replica} (node{replica}, pid 7) did not stop its ranks: not even SIGKILL ends pid 9"
        assert isinstance(lost, HostLost) and (lost.replica, lost.result.reason) == (replica, reason)
        assert [other for other in (1, 2) if rendezvous.members.registered(other)] == [1, 2][replica:]

    run(tmp_path, scenario)


def test_a_late_answer_to_a_request_that_was_given_up_ends_nothing(tmp_path: Path) -> None:
    """The answers of a host to an attempt that another host's loss has ended are of no later attempt."""

    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        member = rendezvous.members.in_attempt(1)
        assert member is not None
        with hosts.call(WatchRanks(), replicas=[1]) as given_up:
            pass
        with hosts.call(WatchRanks(), replicas=[1]) as present:
            member.answer({"type": "answer", "id": given_up.number, "answer": []})
            assert present.answers.empty() and given_up.answers.empty()
            member.answer({"type": "answer", "id": present.number, "answer": []})
            assert present.answers.get_nowait() == (1, [])
        assert rendezvous.members.registered(1) == HOSTS[1]

    run(tmp_path, scenario)


def test_the_loss_of_a_host_ends_its_own_requests_and_counts_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of hosts may be lost at once, each of which has a request of its own."""
    ended: list[int] = []
    monkeypatch.setattr(HostCall, "put", lambda call, replica, answer: ended.append(replica))

    async def main() -> None:
        rendezvous = Rendezvous(HostNetwork(Address("unix", path="/nowhere"), HostSpec(replicas=50)))
        hosts, members = JobHosts(rendezvous, NodeRange(50, 50, 1.0), Mock(), AsyncMock()), rendezvous.members
        lost = [rendezvous.register(Registration(replica, "node", 1), Mock()) for replica in range(1, 50)]
        members.form(members.able)
        with contextlib.ExitStack() as calls:
            for member in lost:
                calls.enter_context(hosts.call(WatchRanks(), replicas=[member.host.replica]))
            for member in lost:
                members.set_state(member, MemberState.LOST)
            assert ended == [member.host.replica for member in lost]

    asyncio.run(main())


def test_no_request_reaches_the_replacement_of_a_lost_host_before_its_attempt(tmp_path: Path) -> None:
    """The event of the loss, which names the cause, is pending when a request fails because of it."""

    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        asking = asyncio.ensure_future(hosts.until_event(hosts.ask(WatchRanks())))
        await until_async(lambda: replicas[1].asked, "the request")
        replicas[1].client._channel.close()
        assert isinstance(await asking, HostLost) and rendezvous.members.missing == [1]
        replacement = Replica(1)
        following = asyncio.ensure_future(replacement.follow(rendezvous.network.rendezvous))
        await rendezvous.members.until(lambda: rendezvous.members.is_complete)
        _, missing = await hosts.collect(SampleRanks(), 0.2)
        assert missing[1] == "host 1 cannot be asked: it is not connected"
        with pytest.raises(HostError, match="not together"):
            await hosts.broadcast(SampleRanks())
        rendezvous.members.form(rendezvous.members.able)
        await hosts.collect(SampleRanks(), 0.2)
        await until_async(lambda: replacement.asked, "the request")
        assert replacement.asked == [SampleRanks()]
        replacement.client._channel.close()
        await following

    run(tmp_path, scenario)


def test_an_answer_too_long_for_a_message_is_an_error_of_its_host_alone(tmp_path: Path) -> None:
    async def scenario(hosts: JobHosts, replicas: list[Replica], rendezvous: Rendezvous) -> None:
        for replica in replicas:
            replica.answer.set_exception(HostRefused("", "x" * (9_000_000 if replica.replica == 1 else 1)))
        _, missing = await hosts.collect(SampleRanks(), WITHIN)
        assert missing[0] == missing[2] == "x"
        assert "over the limit" in missing[1]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("Explode", {}, "unknown request 'Explode'"),
        ("StopRanks", {"signal": "15", "grace": 1.0}, "signal is '15', not int"),
        ("StopRanks", {"signal": 15}, "StopRanks lacks 'grace'"),
        ("LaunchRanks", {"world": {}}, "world lacks 'attempt'"),
    ],
)
def test_an_invalid_request_is_named(name: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode_request({"name": name, "fields": fields})


@pytest.mark.parametrize(
    "answer",
    [{}, {"answer": 7}, {"answer": {"nproc": "1"}}, {"error": "too long"}, {"refused": {}}, {"refused": {"host": 1}}],
)
def test_an_invalid_answer_is_an_error(answer: dict[str, Any]) -> None:
    async def main() -> None:
        call = HostCall(1, BeginRun(1, "token", RunRequest(None, None)), [0])
        call.receive(0, answer)
        assert type(call.answers.get_nowait()[1]) is HostError

    asyncio.run(main())


def test_a_heartbeat_is_no_report() -> None:
    assert decode_report({"type": "alive"}) is None
    with pytest.raises(DecodeError, match="number is '1', not int"):
        decode_report({"type": "SignalReceived", "number": "1", "announced": None})
