# SPDX-License-Identifier: BSD-3-Clause
"""A job on hosts whose answers are scripted: its attempts, and the transitions that events cause."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.waits import WITHIN
from torchx_monarch.controller import elastic
from torchx_monarch.controller.attempts import RankRun
from torchx_monarch.controller.commands import CommandController
from torchx_monarch.controller.controller import Controller
from torchx_monarch.controller.elastic import NodeRange, listed
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostLost,
    HostPreempted,
    RunEndRequested,
    StopRequested,
)
from torchx_monarch.controller.host_messages import (
    BeginRun,
    Exits,
    HostCall,
    HostError,
    HostRefused,
    Launched,
    LaunchRanks,
    OpenStore,
    Request,
    RunBegun,
    StoreOpened,
)
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.members import MemberState
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model import backoff
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.transport.connections import Address

FIXED = NodeRange(2, 2, 0.2)
SPARED = NodeRange(2, 2, 0.2, spares=1)
BEGUN = RunBegun(1, "id", 2, 1.0)


def exits(replica: int, code: int, stopped_at: float | None = None) -> tuple[int, Exits]:
    return replica, [RankExit(replica, 0, replica, f"node{replica}", 7, code, 2.0, stopped_at)]


GOOD = [exits(0, 0), exits(1, 0)]
LOST = HostLost(1, JobResult(1, "lost"))
PREEMPTED = HostPreempted(1, JobResult(143, "preempted", stopped=True, replica=1))
STOP = StopRequested(0, JobResult(143, "stopped", stopped=True), signal.SIGINT)
RUN_END = RunEndRequested(0, JobResult(143, "run ended", stopped=True))


class Job(JobHosts):
    """A job whose attempts are given: the exits that its hosts report, the event that ends it, or an error of a host.

    ``log`` has the replicas of each mesh, and the signals that have stopped the ranks.
    """

    def __init__(
        self, sizes: NodeRange, replacements: int, *attempts: Sequence[tuple[int, Exits]] | HostEvent | HostError
    ) -> None:
        spec = HostSpec(
            replicas=sizes.max_hosts + sizes.spares,
            spares=sizes.spares,
            replacements=replacements,
            exclude_after=2,
            host_timeout=1.0,
            lease=0.05,
        )
        rendezvous = Rendezvous(HostNetwork(Address("unix", path="/nowhere"), spec), sizes.min_hosts)
        reporter = Reporter(Console(2), None, "trainer")
        super().__init__(rendezvous, sizes, reporter, AsyncMock())
        self.report_timeout = 0.05
        self.report: HostEvent | None = None  # arrives after the exits
        self.log: list[object] = []
        self.while_stopping: Callable[[], None] = lambda: None
        self._attempts = list(attempts)
        self.register(range(spec.replicas))

    def register(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            self.rendezvous.register(Registration(replica, f"node{replica}", 1))

    async def ask(self, request: Request[Any], *args: Any, **more: Any) -> dict[int, Any]:
        self.log += [list(self.members.attempt.hosts)] if isinstance(request, BeginRun) else []
        answers: dict[type[Request[Any]], Any] = {
            BeginRun: BEGUN,
            OpenStore: StoreOpened("node0", 29500, True),
            LaunchRanks: Launched((7,)),
        }
        return dict.fromkeys(self.members.attempt.hosts, answers[type(request)])

    async def collect(self, request: Request[Any], *args: Any) -> tuple[dict[int, Any], dict[int, str]]:
        return {}, {}

    @contextmanager
    def call(self, request: Request[Any], *args: Any) -> Iterator[HostCall[Any]]:
        step = self._attempts.pop(0)
        answers: Sequence[tuple[int, Any]] = [(0, step)] if isinstance(step, HostError) else []
        if isinstance(step, HostEvent):
            self.post(step)
        elif not isinstance(step, HostError):
            answers = step
            if self.report is not None:
                asyncio.get_running_loop().call_later(0.01, self.post, self.report)
        call = HostCall(0, request, [replica for replica, _ in answers] or [0])
        for answer in answers:
            call.put(*answer)
        yield call

    def post(self, event: HostEvent) -> None:
        if isinstance(event, HostLost):
            self.lose(event.replica)
        self.events.post(event)

    def lose(self, replica: int) -> None:
        member = self.members.get(replica)
        assert member is not None
        self.members.set_state(member, MemberState.LOST)

    async def stop(self, number: int, grace: float) -> None:
        self.log.append(number)
        self.while_stopping()
        if not self.sizes.spares:
            self.register(self.members.missing)  # replacements arrive

    def run(self) -> RankRun:
        return RankRun(self, HangWatch(self))

    def result(self) -> JobResult:
        controller = Controller(self, HangWatch(self))
        return asyncio.run(asyncio.wait_for(controller.run(), WITHIN))


def test_losses_while_ranks_are_stopped_cost_one_replacement() -> None:
    job = Job(NodeRange(3, 3, 0.2), 1, LOST, GOOD)
    job.while_stopping = lambda: job.post(HostLost(2, JobResult(1, "lost too")))
    assert job.result().code == 0
    assert job.log == [[0, 1, 2], signal.SIGTERM, [0, 1, 2]]
    assert not job.events.pending


def test_a_lost_host_does_not_end_a_row_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "_FIRST_DELAY", 0.01)
    job, lines = Job(FIXED, 1, [exits(1, 3)], LOST, [exits(1, 3)], GOOD), list[str]()
    monkeypatch.setattr(job.reporter, "line", lines.append)
    assert job.result().code == 0
    assert [line.partition(" 0.0 s")[0] for line in lines if "waits" in line] == ["the restart waits"]


def test_a_stop_request_while_ranks_are_stopped_is_not_lost() -> None:
    job = Job(FIXED, 1, LOST)
    job.while_stopping = lambda: job.post(STOP)
    assert job.result() is STOP.result
    assert job.log == [[0, 1], signal.SIGTERM, signal.SIGINT]


def test_a_stop_request_has_its_own_signal() -> None:
    job = Job(FIXED, 0, STOP)
    assert job.result() is STOP.result and job.log == [[0, 1], signal.SIGINT]


def test_the_end_of_a_run_waits_until_the_hosts_are_together() -> None:
    job = Job(FIXED, 0, GOOD)
    job.post(RUN_END)
    assert job.result() is RUN_END.result
    assert list(job.members.attempt.hosts) == [0, 1]


def test_a_host_that_answers_nonsense_ends_the_job() -> None:
    result = Job(FIXED, 0, HostError("the answer lacks 'code'")).result()
    assert (result.code, result.reason) == (1, "the answer lacks 'code'")


def test_a_host_that_refuses_to_start_ranks_is_named() -> None:
    result = Job(FIXED, 0, HostRefused("host 1 (node1)", "cannot write the ranks' logs: no space\nTraceback")).result()
    assert (result.code, result.reason) == (1, "host 1 (node1): cannot write the ranks' logs: no space")


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


def test_a_spare_takes_the_place_of_a_preempted_host() -> None:
    job = Job(SPARED, 0, PREEMPTED, GOOD)
    assert job.result().code == 0
    assert job.log == [[0, 1], signal.SIGTERM, [0, 2]]


@pytest.mark.parametrize(("missing", "used"), [(2, [0, 1]), (1, [0, 2])], ids=["the spare", "another"])
def test_a_host_that_never_comes_fails_no_job_with_a_spare(
    missing: int, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_ORDER_TIMEOUT", 0.2)
    job = Job(SPARED, 0, GOOD)
    job.lose(missing)
    assert job.result().code == 0 and job.log == [used]


def test_a_host_that_fails_again_stays_where_no_other_can_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(FIXED, 0, GOOD)
    assert job.result().code == 0
    said: list[str] = []
    monkeypatch.setattr(job.reporter, "report", lambda kind, message, **more: said.append(message))
    assert [job.gatherer.blame(replica, "failed_alone", "boom") for replica in (0, 0, 1, 1)] == [None] * 4
    assert [message.partition("; it stays, because ")[2] for message in said] == [
        "the controller runs there",
        "no other host can take its place now",
    ]


@pytest.mark.parametrize("code", [-15, 0], ids=["killed by SIGTERM", "handles SIGTERM and exits with 0"])
def test_a_signal_to_a_host_is_the_cause_even_if_the_exits_of_its_ranks_arrive_first(code: int) -> None:
    job = Job(FIXED, 0, [exits(0, 0), exits(1, code, stopped_at=1.0)])
    job.report, job.report_timeout = PREEMPTED, WITHIN
    assert job.result() == PREEMPTED.result


def test_ranks_that_a_host_has_stopped_without_a_report_have_not_succeeded() -> None:
    result = Job(FIXED, 0, [exits(0, 0), exits(1, -15, stopped_at=1.0)]).result()
    assert result.code == 143
    assert result.reason.startswith("host 1 has stopped its ranks and not reported why: rank 1 (")


@pytest.mark.parametrize("others", [[], [LOST]], ids=["alone", "while another host is lost"])
def test_a_command_that_its_host_cannot_start_fails_the_role(
    others: list[HostEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(FIXED, len(others))
    for event in others:
        job.post(event)
    monkeypatch.setattr(job, "ask_host", AsyncMock(side_effect=HostRefused("host 0 (node0)", "too many open files")))
    result = asyncio.run(asyncio.wait_for(CommandController(job).run(), WITHIN))
    assert (result.code, result.reason) == (1, "host 0 (node0): too many open files")


def test_an_attempt_that_ends_before_its_ranks_have_started_has_no_exits(tmp_path: Path) -> None:
    recorded = tmp_path / "events.jsonl"

    async def main() -> None:
        job = Job(FIXED, 0, GOOD)
        job.reporter = Reporter(Console(2), str(recorded), "trainer")
        job.members.form(job.members.able)
        run = job.run()
        ended = await run.run({0: BEGUN, 1: BEGUN})
        assert isinstance(ended, JobResult) and ended.reason == "all 2 ranks ended with code 0"
        run.advance(is_restart=False)
        assert job.members.attempt.number == 1
        await run.stop(15)

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
    job = Job(FIXED, 0, [(0, [exits(replica, code)[1][0] for replica, code in enumerate(codes)])], GOOD)
    assert job.result().code == 0
    assert [name for name in ("node0", "node1") if name in job.gatherer._failures] == blamed
