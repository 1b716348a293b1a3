# SPDX-License-Identifier: BSD-3-Clause
"""Leases: who counts as lost, and who does not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller.host_events import HostEvent, HostLost
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import Address
from torchx_monarch.transport.lease import Leases


def test_a_silent_peer_expires_once_and_one_that_is_heard_does_not() -> None:
    async def main() -> list[str]:
        expired: list[str] = []
        leases: Leases[str] = Leases(0.5, expired.append)
        leases.start()
        leases.renew("silent")
        leases.renew("gone")
        leases.drop("gone")

        def is_over() -> bool:
            leases.renew("heard")
            return bool(expired)

        await until_async(is_over, "the end of a lease")
        await asyncio.sleep(0.1)
        leases.stop()
        return expired

    assert asyncio.run(main()) == ["silent"]


def test_time_in_which_this_process_has_not_run_does_not_count() -> None:
    async def main() -> None:
        expired: list[str] = []
        leases: Leases[str] = Leases(1.0, expired.append)
        leases.start()
        leases.renew("peer")
        assert leases.own_pause == 0
        time.sleep(2.5)  # as SIGSTOP does it
        for _ in range(5):  # the look that was due
            await asyncio.sleep(0)
        assert not expired
        assert leases.own_pause > 2.0
        leases.stop()

    asyncio.run(main())


@pytest.fixture
def address(leaves_nothing: None) -> Address:
    import tempfile

    return Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))


def test_both_ends_of_a_rendezvous_name_the_other_when_it_is_silent(address: Address) -> None:
    async def main() -> tuple[HostEvent, str]:
        first = Rendezvous(HostNetwork(address, HostSpec(replicas=2, lease=0.6)))
        first.register(Registration(0, "node0", 4710, 1))
        await first.start()
        host = Registration(1, "node1", 4711, 1)
        # It sends no heartbeats: nobody waits for its result.
        silent = await RendezvousClient.join(HostNetwork(address), host, WITHIN)
        host_event = await asyncio.wait_for(first.events.next(), WITHIN)
        silent._writer.close()

        async def register_and_be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await messages.receive(reader)
            await messages.send(writer, {"type": "registered", "name": "host 0 (node0, pid 4710)"})
            await reader.read()
            writer.close()

        other = Address("unix", path=address.path + "2")
        server = await asyncio.start_unix_server(register_and_be_silent, other.path)
        member = await RendezvousClient.join(HostNetwork(other, HostSpec(lease=0.6)), host, WITHIN)
        assert await asyncio.wait_for(member.result(AsyncMock()), WITHIN) is None
        server.close()
        await first.announce(JobResult(1, "over"), 5)
        Path(other.path).unlink(missing_ok=True)
        return host_event, member.lost

    host_event, lost = asyncio.run(main())
    said = "does not answer: no message from it for 0.6 s (lease)"
    assert (host_event.replica, type(host_event)) == (1, HostLost)
    assert host_event.result.reason == f"host 1 (node1, pid 4711) {said}"
    assert lost == f"host 0 (node0, pid 4710) {said}"


def test_heartbeats_keep_both_ends(address: Address) -> None:
    async def main() -> JobResult | None:
        first = Rendezvous(HostNetwork(address, HostSpec(replicas=2, lease=1.0)))
        await first.start()
        member = await RendezvousClient.join(
            HostNetwork(address, HostSpec(lease=1.0)), Registration(1, "node1", 1, 1), WITHIN
        )
        result = asyncio.ensure_future(member.result(AsyncMock()))
        done, _ = await asyncio.wait([result], timeout=3.0)  # three leases
        assert not done and not first.events.pending
        announcing = asyncio.ensure_future(first.announce(JobResult(7, "over"), 5))
        told = await asyncio.wait_for(result, WITHIN)
        member._writer.close()
        await announcing
        return told

    assert asyncio.run(main()) == JobResult(7, "over")


def test_a_replica_0_that_did_not_run_blames_itself_for_the_hosts_that_have_left(address: Address) -> None:
    async def main() -> HostEvent:
        first = Rendezvous(HostNetwork(address, HostSpec(replicas=2, lease=1.0)))
        first.register(Registration(0, "node0", 4710, 1))
        await first.start()
        member = await RendezvousClient.join(HostNetwork(address), Registration(1, "node1", 4711, 1), WITHIN)
        member._writer.close()
        time.sleep(2.5)  # as SIGSTOP does it
        host_event = await asyncio.wait_for(first.events.next(), WITHIN)
        await first.announce(JobResult(1, "over"), 5)
        return host_event

    host_event = asyncio.run(main())
    assert (host_event.replica, host_event.result.replica) == (1, 0)  # the job can go on when host 1 comes back
    assert host_event.result.reason.startswith(
        "host 0 (node0, pid 4710) did not run for 2 s, and host 1 (node1, pid 4711)"
    )
