# SPDX-License-Identifier: BSD-3-Clause
"""Who is let in by replica 0, and when."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller import rendezvous
from torchx_monarch.controller.host_messages import SignalReceived
from torchx_monarch.controller.host_network import HostNetwork, RendezvousError
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.world import World
from torchx_monarch.transport import lease
from torchx_monarch.transport.connections import Address


def host(replica: int, attempt: int = -1) -> Registration:
    world = World(attempt, attempt, attempt, (), "", 0, False, "") if attempt >= 0 else None
    return Registration(replica, "here", 1, world=world)


def test_a_result_before_all_have_come_is_told_to_those_that_come(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LATECOMERS", 60.0)

    async def main() -> None:
        first = Rendezvous(HostNetwork(address, HostSpec(replicas=2)))
        await first.start()
        first.register(host(0))
        announcing = asyncio.ensure_future(first.announce(JobResult(2, "no such file"), 60))
        late = await RendezvousClient.join(HostNetwork(address), host(1), 60)
        result = await asyncio.wait_for(late.result(AsyncMock()), WITHIN)
        assert result is not None and result.code == 2
        late._channel.close()
        await asyncio.wait_for(announcing, WITHIN)  # nobody is missing any more

    asyncio.run(main())


def test_a_replica_0_that_may_open_too_few_files_for_its_hosts_ends_at_once(address: Address) -> None:
    async def main() -> None:
        await Rendezvous(HostNetwork(address, HostSpec(replicas=1_000_000_000))).start()

    with pytest.raises(RendezvousError, match=r"each of 1000000000 hosts, and its machine allows it \d+ open files"):
        asyncio.run(main())


def test_a_host_that_is_started_again_before_the_others_waits_for_them(address: Address) -> None:
    """A container is, by dockerd: were it told the result, it would fail, and use up its restarts for nothing."""

    async def main() -> None:
        first = Rendezvous(HostNetwork(address, HostSpec(replicas=2)))
        await first.start()
        first.register(host(0))
        lost = await RendezvousClient.join(HostNetwork(address), host(1), WITHIN)
        first.members.form(first.members.able)
        lost._channel.close()
        await until_async(lambda: [event.replica for event in first.events.pending] == [1], "the loss")
        first.put_off_restarted_hosts()
        joining = asyncio.ensure_future(RendezvousClient.join(HostNetwork(address), host(1), 20))
        with pytest.raises(RendezvousError, match="was not reached in 0.3 s: .*are ending"):
            await RendezvousClient.join(HostNetwork(address), host(1), 0.3)
        # One that was there, and has lost its connection alone, gets the result.
        rejoined = await RendezvousClient.join(HostNetwork(address), host(1, attempt=0), WITHIN)
        announcing = asyncio.ensure_future(first.announce(JobResult(7, "over"), 5))
        result = await asyncio.wait_for(rejoined.result(AsyncMock()), WITHIN)
        assert result is not None and result.code == 7
        rejoined._channel.close()
        await announcing
        assert not joining.done()
        second = Rendezvous(HostNetwork(address, HostSpec(replicas=2)))
        await second.start()
        second.register(host(0))
        rendezvous_client = await asyncio.wait_for(joining, WITHIN)
        await asyncio.wait_for(second.members.until(lambda: second.members.able_count == 2), WITHIN)
        rendezvous_client._channel.close()
        await second.announce(JobResult(0, ""), 5)

    asyncio.run(main())


def test_losses_and_errors_of_spare_hosts_are_no_events(address: Address) -> None:
    async def main() -> None:
        said: list[str] = []
        first = Rendezvous(HostNetwork(address, HostSpec(replicas=4, spares=2)), min_hosts=2, say=said.append)
        spares: list[list[int]] = []
        first.members.on_idle_change = lambda: spares.append([host.replica for host in first.members.idle])
        await first.start()
        first.register(host(0))
        broken = dataclasses.replace(host(3), error="no such file", code=2)
        with pytest.raises(RendezvousError, match="no such file"):
            await RendezvousClient.join(HostNetwork(address), broken, WITHIN)
        member = await RendezvousClient.join(HostNetwork(address), host(1), WITHIN)
        first.members.form(first.members.able)
        spare = await RendezvousClient.join(HostNetwork(address), host(2), WITHIN)
        await until_async(lambda: spares[-1] == [2], "the spare host")
        spare._channel.close()
        await asyncio.wait_for(first.members.until(lambda: first.members.able_count == 2), WITHIN)
        preempted = await RendezvousClient.join(HostNetwork(address), host(2), WITHIN)
        await preempted.report(SignalReceived(signal.SIGTERM, False))
        result = await asyncio.wait_for(preempted.result(AsyncMock()), WITHIN)
        assert result is not None and preempted.dismissed
        preempted._channel.close()
        assert spares[-4:] == [[2], [], [2], []] and not first.events.pending
        assert [line.rpartition("; ")[2] for line in said] == ["it ran no ranks"] * 2
        member._channel.close()
        await until_async(lambda: [event.replica for event in first.events.pending] == [1], "the loss")
        await first.announce(JobResult(0, ""), 5)

    asyncio.run(main())


def test_a_client_that_leaves_as_the_ranks_end_does_not_fail_the_job(address: Address) -> None:
    """Whatever the replica has done of the end of its connection by then."""

    async def main(steps: int) -> None:
        first = Rendezvous(HostNetwork(address, HostSpec()))
        await first.start()
        _, client = await HostNetwork(address).greet(address, {"type": "stop", "save": True})
        await until_async(lambda: first.events.pending, "the request")
        client.close()
        for _ in range(steps):
            await asyncio.sleep(0)
        await asyncio.wait_for(first.await_cancel(JobResult(0, "all ranks ended with code 0")), WITHIN)
        first.register(host(0))
        await first.announce(JobResult(0, ""), 5)

    for steps in range(12):
        asyncio.run(main(steps))


def test_time_in_which_this_process_has_not_run_counts_for_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = [0.0]
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stopped)))

    async def main() -> None:
        expired: list[str] = []
        peer: Any = SimpleNamespace(silence=0.0, lease_expired=lambda: expired.append("peer"))
        leases = lease.Leases(1.0, lambda: [peer])
        leases.start()
        assert leases.own_pause == 0
        stopped.append(2.5)  # at once, as with SIGSTOP
        await until_async(lambda: peer.silence, "the look that was due")
        assert not expired
        assert leases.own_pause > 2.0
        leases.stop()

    asyncio.run(main())


def test_each_try_closes_its_connection_to_a_program_that_is_no_replica_0(address: Address) -> None:
    talked, left = 0, 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal talked, left
        talked += 1
        writer.write(b"220 ready\n")
        await reader.read()
        left += 1
        writer.close()

    async def main() -> None:
        async with await asyncio.start_unix_server(talk, address.path):
            with pytest.raises(RendezvousError, match="what listens there is another program"):
                await RendezvousClient.join(HostNetwork(address), host(1), 0.1)
            await until_async(lambda: left == talked > 1, "the end of the connections")
        Path(address.path).unlink(missing_ok=True)  # Python 3.13 does that

    asyncio.run(main())
