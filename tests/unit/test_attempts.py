# SPDX-License-Identifier: BSD-3-Clause
"""The result of an attempt whose host has stopped its own ranks, and what is recorded of an attempt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tests.waits import WITHIN
from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.elastic import HostGatherer, NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import HostEvents, HostPreempted, Interrupted
from torchx_monarch.controller.host_messages import Launched, Request, StoreOpened, WatchRanks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.system.console import Console, WriterThread

OPTIONS = JobOptions(HostSpec(host_timeout=1.0, lease=0.05), NodeRange(2, 2, 0.2), "id", 1.0, report_timeout=0.05)
PREEMPTED = HostPreempted(1, JobResult(143, "preempted", stopped=True, replica=1))


def exit_of(rank: int, code: int, stopped_at: float | None = None) -> RankExit:
    return RankExit(rank, 0, rank, "node", 100 + rank, code, time=2.0, stopped_at=stopped_at)


class ScriptedHosts:
    """Two hosts with a rank each, whose ranks exit as given."""

    present = ()
    options = OPTIONS

    def __init__(self, reporter: Reporter, *exits: RankExit) -> None:
        self.events = HostEvents()
        self.reporter = reporter
        self._exits = exits

    async def ask_own(self, request: Request[Any], timeout: float) -> StoreOpened:
        return StoreOpened("127.0.0.1", 1, False)

    async def ask(self, request: Request[Any], timeout: float | None = None) -> AsyncIterator[tuple[int, Any]]:
        for one in self._exits:
            watched = isinstance(request, WatchRanks)
            yield one.replica, [one] if watched else Launched((one.pid,))

    async def stop(self, number: int, grace: float, note: object) -> None:
        """No rank is left to be stopped."""


def result_of(exits: list[RankExit], report: HostPreempted | None = None) -> JobResult:
    """The result of a job of one attempt; ``report`` arrives after the exits."""

    async def run() -> JobResult:
        hosts = cast(JobHosts, ScriptedHosts(Reporter(Console(2), None, "trainer"), *exits))
        attempts = Attempts(hosts, Mock(HostGatherer), HangWatch(hosts), None)
        if report is not None:
            asyncio.get_running_loop().call_later(0.01, hosts.events.post, report)
        try:
            return await attempts.run([Registration(replica, "node", 1, 1) for replica in range(2)])
        except Interrupted as interruption:
            return interruption.event.result

    return asyncio.run(asyncio.wait_for(run(), WITHIN))


def test_ranks_that_end_by_themselves_succeed() -> None:
    assert result_of([exit_of(0, 0), exit_of(1, 0)]) == JobResult(0, "all 2 ranks ended with code 0")


def test_ranks_of_other_hosts_that_fail_at_the_same_time_are_of_one_cause() -> None:
    assert result_of([exit_of(0, 2), exit_of(1, 2)]).reason == "all 2 ranks: exited with code 2"
    assert result_of([exit_of(0, -9), exit_of(1, -9)]).reason.startswith("rank 0 (")  # as by the kernel, on one machine


@pytest.mark.parametrize("code", [-15, 0], ids=["killed by SIGTERM", "handles SIGTERM and exits with 0"])
def test_a_signal_to_a_host_is_the_cause_even_if_the_exits_of_its_ranks_arrive_first(code: int) -> None:
    assert result_of([exit_of(0, 0), exit_of(1, code, stopped_at=1.0)], PREEMPTED) == PREEMPTED.result


def test_ranks_that_a_host_has_stopped_without_a_report_have_not_succeeded() -> None:
    result = result_of([exit_of(0, 0), exit_of(1, -15, stopped_at=1.0)])
    assert result.code == 143
    assert result.reason.startswith("host 1 has stopped its ranks and not reported why: rank 1 (")


def test_an_attempt_that_ends_before_its_ranks_have_started_has_no_exits(tmp_path: Path) -> None:
    recorded = tmp_path / "events.jsonl"

    async def run() -> None:
        reporter = Reporter(Console(2), str(recorded), "trainer")
        hosts = cast(JobHosts, ScriptedHosts(reporter, exit_of(0, 0), exit_of(1, 0)))
        attempts = Attempts(hosts, Mock(HostGatherer), HangWatch(hosts), None)
        await attempts.run([Registration(replica, "node", 1, 1) for replica in range(2)])
        attempts.hosts_changed(joined=True)
        assert attempts.number == 1
        await attempts.stop(15)

    asyncio.run(asyncio.wait_for(run(), WITHIN))
    WriterThread.finish()
    kinds = [(event["kind"], event.get("attempt")) for event in map(json.loads, recorded.read_text().splitlines())]
    assert [attempt for kind, attempt in kinds if kind == "attempt_end"] == [0]
