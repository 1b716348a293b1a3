# SPDX-License-Identifier: BSD-3-Clause
"""The runs of a session and their attempts, on hosts whose answers are scripted."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.elastic import HostFailures, HostGatherer, NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import HostEvents, HostLost, Interrupted, StopRequested
from torchx_monarch.controller.host_messages import (
    Exits,
    HostRefused,
    Launched,
    LaunchRanks,
    OpenStore,
    Request,
    StoreOpened,
    WatchRanks,
)
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.host_requests import HostRequests
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rank_queries import SampleRecorder
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.session import Session
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.system.console import Console
from torchx_monarch.transport.connections import Address

HOSTS = [Registration(0, "node0", 1, 1), Registration(1, "node1", 1, 1, attempt=1)]
FIXED = NodeRange(2, 2, 1.0)
OPTIONS = JobOptions(HostSpec(host_timeout=1.0, lease=0.05), FIXED, "id", 1.0, 1, report_timeout=0.05)
REFUSED = ("host 1 (node1)", "cannot write the ranks' logs")


def exits(replica: int, code: int) -> tuple[int, Exits]:
    return replica, [RankExit(replica, 0, replica, f"node{replica}", 7, code, 1.0)]


GOOD, FAILED = [exits(0, 0), exits(1, 0)], [exits(1, 3)]


class ScriptedHosts(JobHosts):
    """Agents whose answers to ``WatchRanks`` are given by attempt; nothing listens anywhere."""

    def __init__(self, events: HostEvents, *watched: list[Any] | Callable[[], None]) -> None:
        super().__init__(OPTIONS, HostRequests({}), events, Reporter(Console(2), None, "trainer"), self._own)
        self.log: list[object] = []
        self.refusal: tuple[type[Request[Any]], bool] | None = None
        self._watched = list(watched)

    async def _own(self, request: Request[Any]) -> Any:
        raise AssertionError("not asked")

    def form(self, hosts: list[Registration]) -> None:
        super().form(hosts)
        self.log.append("hosts")

    async def ask_own(self, request: Request[Any], timeout: float) -> Any:
        assert isinstance(request, OpenStore)
        if self.refusal == (OpenStore, True):
            raise HostRefused(*REFUSED, own=True)
        return StoreOpened("node0", 29500, True)

    async def ask(self, request: Request[Any], timeout: float | None = None) -> AsyncIterator[tuple[int, Any]]:
        if self.refusal == (type(request), False):
            raise HostRefused(*REFUSED)
        if isinstance(request, LaunchRanks):
            self.log.append(("launch", request.world.attempt))
            for host in self.present:
                yield host.replica, Launched((7,))
        if isinstance(request, WatchRanks):
            answers = self._watched.pop(0)
            if callable(answers):
                answers()
                await self.events.interrupt(asyncio.sleep(60))
                return
            for answer in answers:
                yield answer

    async def stop(self, number: int, grace: float, note: Callable[[Exits], None]) -> None:
        self.log.append(("stop", number))


def new_attempts(hosts: JobHosts, failures: HostFailures | None = None) -> Callable[[], Attempts]:
    rendezvous = Rendezvous(HostNetwork(Address("unix", path="/nowhere"), HostSpec(replicas=2)))
    gatherer = HostGatherer(FIXED, rendezvous, hosts.reporter, failures)
    return lambda: Attempts(hosts, gatherer, HangWatch(hosts), None)


def batch_job(hosts: JobHosts, failures: HostFailures | None = None) -> Session:
    return Session(hosts, new_attempts(hosts, failures), SampleRecorder(hosts, None))


def batch(
    *watched: Any, refusal: tuple[type[Request[Any]], bool] | None = None, failures: HostFailures | None = None
) -> tuple[JobResult, list[object]]:
    async def main() -> tuple[JobResult, list[object]]:
        hosts = ScriptedHosts(HostEvents(), *watched)
        hosts.refusal = refusal
        fresh = [dataclasses.replace(host, attempt=-1) for host in HOSTS]
        return await batch_job(hosts, failures).run(fresh), hosts.log

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [((3, 3), []), ((0, 3), ["node1"]), ((3, 4), ["node0"])],
    ids=["all hosts alike", "one host", "each differently"],
)
def test_a_failure_that_all_hosts_share_is_not_counted_for_a_machine(codes: tuple[int, ...], blamed: list[str]) -> None:
    failures, ended = HostFailures(9, 60.0), [exits(replica, code)[1][0] for replica, code in enumerate(codes)]
    result, _ = batch([(0, ended)], GOOD, failures=failures)
    assert result.code == 0
    assert [name for name in ("node0", "node1") if failures.describe(name) == "1 failure within 60 s"] == blamed


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((OpenStore, True), "host 0: cannot write the ranks' logs"),
        ((LaunchRanks, False), "cannot write the ranks' logs"),
    ],
)
def test_a_refusal_ends_a_batch_job(refusal: tuple[type[Request[Any]], bool], reason: str) -> None:
    with pytest.raises(Interrupted) as caught:
        batch(refusal=refusal)
    assert isinstance(caught.value.event, StopRequested)
    assert caught.value.event.result == JobResult(1, reason)


def test_an_event_leaves_the_ranks_to_the_controller_and_the_run_goes_on_on_the_next_mesh() -> None:
    async def main() -> None:
        events = HostEvents()
        lost = HostLost(1, JobResult(1, "lost"))
        hosts = ScriptedHosts(events, lambda: events.post(lost), GOOD)
        session = batch_job(hosts)
        with pytest.raises(Interrupted) as caught:
            await session.run(HOSTS)
        assert caught.value.event is lost and events.pending == [lost]
        events.settle(lost)
        assert await session.stop(lost, left=True)
        assert not await session.stop(lost, left=True)  # nothing runs any more
        session.hosts_changed(joined=False)
        assert (await session.run(HOSTS)).code == 0
        # Host 1 has run attempt 1 under an earlier replica 0.
        assert hosts.log == ["hosts", ("launch", 2), ("stop", 15), "hosts", ("launch", 3)]

    asyncio.run(main())
