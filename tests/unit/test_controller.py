# SPDX-License-Identifier: BSD-3-Clause
"""The transitions that events cause: which end a job, which start it on other hosts, and which wait their turn."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from unittest.mock import AsyncMock, Mock

import pytest

from tests.waits import WITHIN
from torchx_monarch.controller import elastic
from torchx_monarch.controller.controller import Controller
from torchx_monarch.controller.elastic import HostFailures, HostGatherer, NodeRange, listed
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostLost,
    HostPreempted,
    Interrupted,
    RunEndRequested,
    StopRequested,
)
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.hosts import JobHosts, JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.system.console import Console
from torchx_monarch.transport.connections import Address

DONE = JobResult(0, "done")
LOST = HostLost(1, JobResult(1, "lost"))
PREEMPTED = HostPreempted(1, JobResult(143, "preempted", stopped=True))
STOP = StopRequested(0, JobResult(143, "stopped", stopped=True), signal.SIGINT)
RUN_END = RunEndRequested(0, JobResult(143, "run ended", stopped=True))


class Job(Controller):
    """A controller whose work is scripted: each step is a result, or events, the first of which interrupts the work."""

    def __init__(self, sizes: NodeRange, replacements: int, *steps: JobResult | tuple[HostEvent, ...]) -> None:
        replicas = sizes.most + sizes.spares
        network = HostNetwork(Address("unix", path="/nowhere"), HostSpec(replicas=replicas, spares=sizes.spares))
        self.rendezvous = Rendezvous(network, sizes.fewest)
        self.log: list[object] = []
        self.closed: list[JobResult] = []
        self.while_stopping: Callable[[], None] = lambda: None
        self.spared = sizes.spares > 0
        self._steps = list(steps)
        reporter = Reporter(Console(2), None, "trainer")
        self.gatherer = HostGatherer(sizes, self.rendezvous.hosts, reporter, HostFailures(2))
        options = JobOptions(HostSpec(replacements=replacements, lease=0.05), sizes, report_timeout=0.05)
        hosts = JobHosts(options, self.rendezvous.requests, self.rendezvous.events, reporter, AsyncMock())
        super().__init__(self.rendezvous, self.gatherer, hosts, Mock(), AsyncMock(close=self.close))
        self._attempts.hosts_changed = self.hosts_changed  # type: ignore[method-assign]
        self.register(range(replicas))

    def register(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            self.rendezvous.register(Registration(replica, "node", 1, 1))

    async def _execute_runs(self, hosts: list[Registration]) -> JobResult:
        self.log.append([host.replica for host in hosts])
        step = self._steps.pop(0)
        if isinstance(step, JobResult):
            return step
        for event in step:
            if isinstance(event, HostLost):
                del self.rendezvous.hosts.registered[event.replica]
            self.rendezvous.events.post(event)
        return await self.rendezvous.events.interrupt(asyncio.sleep(60, DONE))

    async def _stop_ranks(self, event: HostEvent, left: bool) -> bool:
        self.log.append((type(event).__name__, event.signal, left))
        self.while_stopping()
        return True

    def hosts_changed(self, joined: bool) -> None:
        self.log.append(joined)
        if not self.spared:
            self.register(self.rendezvous.hosts.missing)  # replacements arrive

    async def close(self, result: JobResult) -> None:
        self.closed.append(result)

    def result(self) -> JobResult:
        result = asyncio.run(asyncio.wait_for(self.run(), WITHIN))
        assert self.closed == [result]
        return result


FIXED = NodeRange(2, 2, 0.2)


def test_losses_while_ranks_are_stopped_cost_one_replacement() -> None:
    job = Job(NodeRange(3, 3, 0.2), 1, (LOST,), DONE)

    def another() -> None:
        del job.rendezvous.hosts.registered[2]
        job.rendezvous.events.post(HostLost(2, JobResult(1, "lost too")))

    job.while_stopping = another
    assert job.result() is DONE
    assert job.log == [[0, 1, 2], ("HostLost", 15, True), False, [0, 1, 2]]
    assert job.rendezvous.events.pending == []


def test_a_stop_request_while_ranks_are_stopped_is_not_lost() -> None:
    job = Job(FIXED, 1, (LOST,))
    job.while_stopping = lambda: job.rendezvous.events.post(STOP) if len(job.log) == 2 else None
    assert job.result() is STOP.result
    assert job.log == [[0, 1], ("HostLost", 15, True), False, ("StopRequested", 2, False)]


def test_the_end_of_a_run_waits_until_the_hosts_are_together() -> None:
    job = Job(FIXED, 0, DONE)
    job.rendezvous.events.post(RUN_END)
    assert job.result() is DONE
    assert job.rendezvous.events.pending == [RUN_END]


def test_what_interrupts_is_an_event_of_the_work_as_well() -> None:
    job = Job(FIXED, 0)

    async def fails(hosts: list[Registration]) -> JobResult:
        raise Interrupted(StopRequested(0, JobResult(7, "no mesh")))

    job._execute_runs = fails  # type: ignore[method-assign]
    assert job.result() == JobResult(7, "no mesh")


@pytest.mark.parametrize(
    ("replicas", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0, 1"),
        ([0, 1, 5, *range(7, 4096)], "0, 1, 5, 7-4095"),
        (range(0, 4096, 2), f"{', '.join(map(str, range(0, 100, 2)))}, and 1998 more"),
    ],
)
def test_replicas_are_listed_in_a_line_of_bounded_length(replicas: Iterable[int], text: str) -> None:
    assert listed(replicas) == text


SPARED = NodeRange(2, 2, 0.2, spares=1)


def test_a_spare_takes_the_place_of_a_preempted_host() -> None:
    job = Job(SPARED, 0, (PREEMPTED,), DONE)
    job.rendezvous._writers[1] = AsyncMock(write=Mock())
    assert job.result() is DONE
    assert job.log == [[0, 1], ("HostPreempted", 15, True), False, [0, 2]]


def test_a_spare_that_is_missing_fails_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_ORDER_TIMEOUT", 0.2)
    job = Job(SPARED, 0, DONE)
    del job.rendezvous.hosts.registered[2]
    assert job.result() is DONE and job.log == [[0, 1]]
    job = Job(SPARED, 0, DONE)
    del job.rendezvous.hosts.registered[1]  # it never comes: the spare is enough
    assert job.result() is DONE and job.log == [[0, 2]]


def test_a_host_that_fails_again_stays_where_no_other_can_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(NodeRange(2, 2, 0.2), 0, DONE)
    assert job.result() is DONE
    said: list[str] = []
    monkeypatch.setattr(job.gatherer._reporter, "report", lambda kind, message, **more: said.append(message))
    hosts = job.rendezvous.hosts.registered
    assert [job.gatherer.blame(hosts[replica], "boom") for replica in (0, 0, 1, 1)] == [None] * 4
    assert [message.partition("; it stays, because ")[2] for message in said] == [
        "the controller runs there",
        "no other host can take its place now",
    ]
