# SPDX-License-Identifier: BSD-3-Clause
"""The runs of a session and their attempts, on hosts whose answers are scripted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.waits import WITHIN
from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.controller import Controller
from torchx_monarch.controller.elastic import HostFailures, HostGatherer, HostRegistry, NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import HostEvent, HostEvents, HostPreempted, Interrupted
from torchx_monarch.controller.host_messages import (
    BeginRun,
    Exits,
    HostRequests,
    Launched,
    LaunchRanks,
    OpenStore,
    Request,
    RunBegun,
    StoreOpened,
    WatchRanks,
)
from torchx_monarch.controller.hosts import JobHosts, JobOptions
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.system.console import Console, WriterThread

HOSTS = [Registration(0, "node0", 1, 1), Registration(1, "node1", 1, 1, attempt=1)]
FIXED = NodeRange(2, 2, 1.0)
OPTIONS = JobOptions(HostSpec(host_timeout=1.0, lease=0.05), FIXED, report_timeout=0.05)
BEGUN = RunBegun(1, "id", 1, 1.0)


def exits(replica: int, code: int, stopped_at: float | None = None) -> tuple[int, Exits]:
    return replica, [RankExit(replica, 0, replica, f"node{replica}", 7, code, 2.0, stopped_at)]


GOOD = [exits(0, 0), exits(1, 0)]
PREEMPTED = HostPreempted(1, JobResult(143, "preempted", stopped=True, replica=1))


class ScriptedHosts(JobHosts):
    """Agents whose answers to ``WatchRanks`` are given by attempt; nothing listens anywhere."""

    def __init__(self, *watched: list[Any]) -> None:
        super().__init__(OPTIONS, HostRequests({}), HostEvents(), Reporter(Console(2), None, "trainer"), self._own)
        self._watched = list(watched)

    async def _own(self, request: Request[Any]) -> Any:
        raise AssertionError("not asked")

    async def ask_own(self, request: Request[Any], timeout: float) -> Any:
        assert isinstance(request, OpenStore)
        return StoreOpened("node0", 29500, True)

    async def ask(self, request: Request[Any], *args: Any) -> AsyncIterator[tuple[int, Any]]:
        answers: dict[type[Request[Any]], Any] = {BeginRun: BEGUN, LaunchRanks: Launched((7,))}
        if type(request) in answers:
            for host in self.present:
                yield host.replica, answers[type(request)]
        if isinstance(request, WatchRanks):
            for answer in self._watched.pop(0):
                yield answer

    async def stop(self, number: int, grace: float, note: Callable[[Exits], None]) -> None:
        """Do nothing: no rank runs."""


def new_gatherer(hosts: JobHosts, failures: HostFailures | None = None) -> HostGatherer:
    return HostGatherer(FIXED, HostRegistry(2), hosts.reporter, failures or HostFailures(0))


def batch(*watched: Any, failures: HostFailures | None = None, report: HostEvent | None = None) -> JobResult:
    """The result of a batch job, or of the event that ends it; ``report`` arrives after the exits."""

    async def main() -> JobResult:
        hosts = ScriptedHosts(*watched)
        if report is not None:
            asyncio.get_running_loop().call_later(0.01, hosts.events.post, report)
        fresh = [dataclasses.replace(host, attempt=-1) for host in HOSTS]
        try:
            gatherer = new_gatherer(hosts, failures)
            controller = Controller(Mock(), gatherer, hosts, lambda: Attempts(hosts, gatherer, HangWatch(hosts)))
            return await controller._execute_runs(fresh)
        except Interrupted as interruption:
            return interruption.event.result

    return asyncio.run(asyncio.wait_for(main(), WITHIN))


@pytest.mark.parametrize("code", [-15, 0], ids=["killed by SIGTERM", "handles SIGTERM and exits with 0"])
def test_a_signal_to_a_host_is_the_cause_even_if_the_exits_of_its_ranks_arrive_first(code: int) -> None:
    assert batch([exits(0, 0), exits(1, code, stopped_at=1.0)], report=PREEMPTED) == PREEMPTED.result


def test_ranks_that_a_host_has_stopped_without_a_report_have_not_succeeded() -> None:
    result = batch([exits(0, 0), exits(1, -15, stopped_at=1.0)])
    assert result.code == 143
    assert result.reason.startswith("host 1 has stopped its ranks and not reported why: rank 1 (")


def test_an_attempt_that_ends_before_its_ranks_have_started_has_no_exits(tmp_path: Path) -> None:
    recorded = tmp_path / "events.jsonl"

    async def main() -> None:
        hosts = ScriptedHosts(GOOD)
        hosts.reporter = Reporter(Console(2), str(recorded), "trainer")
        hosts.form(HOSTS)
        attempts = Attempts(hosts, new_gatherer(hosts), HangWatch(hosts))
        assert await attempts.run(HOSTS, BEGUN) == JobResult(0, "all 2 ranks ended with code 0")
        attempts.hosts_changed(joined=True)
        assert attempts.current.number == 1
        await attempts.stop(15)

    asyncio.run(asyncio.wait_for(main(), WITHIN))
    WriterThread.finish()
    events = map(json.loads, recorded.read_text().splitlines())
    assert [event["attempt"] for event in events if event["kind"] == "attempt_end"] == [0]


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [((3, 3), []), ((0, 3), ["node1"]), ((3, 4), ["node0"])],
    ids=["all hosts alike", "one host", "each differently"],
)
def test_a_failure_that_all_hosts_share_is_not_counted_for_a_machine(codes: tuple[int, ...], blamed: list[str]) -> None:
    failures, ended = HostFailures(9), [exits(replica, code)[1][0] for replica, code in enumerate(codes)]
    assert batch([(0, ended)], GOOD, failures=failures).code == 0
    assert [name for name in ("node0", "node1") if name in failures._failures] == blamed
