# SPDX-License-Identifier: BSD-3-Clause
"""Leases: who counts as lost, and who does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller.host_events import HostEvent
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import lease
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


@pytest.fixture
def stop_this_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let 2.5 s pass at once, as SIGSTOP does it."""
    stopped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stopped))
    monkeypatch.setattr(lease, "time", clock)
    return lambda: stopped.append(2.5)


def test_time_in_which_this_process_has_not_run_does_not_count(stop_this_process: Callable[[], None]) -> None:
    async def main() -> None:
        expired: list[str] = []
        leases: Leases[str] = Leases(1.0, expired.append)
        leases.start()
        leases.renew("peer")
        assert leases.own_pause == 0
        stop_this_process()
        await until_async(lambda: leases._silence["peer"], "the look that was due")
        assert not expired
        assert leases.own_pause > 2.0
        leases.stop()

    asyncio.run(main())


def test_a_replica_0_that_did_not_run_blames_itself_for_the_hosts_that_have_left(
    address: Address, stop_this_process: Callable[[], None]
) -> None:
    async def main() -> HostEvent:
        first = Rendezvous(HostNetwork(address, HostSpec(replicas=2, lease=1.0)))
        first.register(Registration(0, "node0", 4710, 1))
        await first.start()
        member = await RendezvousClient.join(HostNetwork(address), Registration(1, "node1", 4711, 1), WITHIN)
        member._writer.close()
        stop_this_process()
        host_event = await asyncio.wait_for(first.events.next(), WITHIN)
        await first.announce(JobResult(1, "over"), 5)
        return host_event

    host_event = asyncio.run(main())
    assert (host_event.replica, host_event.result.replica) == (1, 0)  # the job can go on when host 1 comes back
    assert host_event.result.reason.startswith(
        "host 0 (node0, pid 4710) did not run for 2 s, and host 1 (node1, pid 4711)"
    )
