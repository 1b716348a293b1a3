# SPDX-License-Identifier: BSD-3-Clause
"""When replica 0 looks for what slows the ranks, what it reports, and what it does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.test_host_choice import host, members
from tests.waits import WITHIN, until_async
from torchx_monarch.controller import hang_watch, slow_watch
from torchx_monarch.controller.elastic import HostGatherer, NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import HostEvents, HostExcluded
from torchx_monarch.controller.host_messages import ReadCollectives, Request, TakeStacks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight import pace
from torchx_monarch.insight.hangs import HostCollectives
from torchx_monarch.insight.pace import HostPace, RankPace
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.insight.stacks import Frame, KernelWait, SharedStacks, ThreadStack
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__(Console(2), None, "trainer")
        self.notes: list[tuple[str, str, dict[str, Any]]] = []
        self.recorded: list[dict[str, object]] = []

    def record(self, kind: str, text: str, **fields: object) -> None:
        self.recorded.append({"kind": kind, **fields})

    def report(self, kind: str, text: str, **fields: object) -> None:
        self.notes.append((kind, text, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.notes]


class Hosts:
    """Two hosts with a rank each, which meet in no collective; host 1's may do fewer steps.

    Attributes:
        slows: whether it does: half of them, and at the second look nearly all.
        starves: whether it waits for a processor for half of the time.
        missing: why hosts do not answer, by replica.
        frames: where it is.
    """

    def __init__(self, spec: HostSpec) -> None:
        self.spec, self.reporter, self.events = spec, Notes(), HostEvents()
        self.members = members(3, host(0), host(1), host(2))
        self.gatherer = HostGatherer(NodeRange(2, 2, 1.0, spares=1), self.members, self.reporter, 3)
        self.members.form([host_ for host_ in self.members.able if host_.replica < 2])
        self.slows, self.starves, self._slow_looks = False, False, 0
        self.missing: dict[int, str] = {}
        self.asked: list[Request[Any]] = []
        self.wait, self.frames = KernelWait("D", "read", "/mnt/x"), (Frame("/p/train.py", 3, "main"),)
        self._steps, self._waited, self._last = [0.0, 0.0], 0.0, time.monotonic()

    async def collect(
        self, request: Request[Any], timeout: float = 0.0, ranks: list[int] | None = None
    ) -> tuple[dict[int, Any], dict[int, str]]:
        self.asked.append(request)
        if isinstance(request, TakeStacks):
            frames, wait = (
                (self.frames, self.wait) if request.rank else ((Frame("/p/train.py", 9, "main"),), KernelWait())
            )
            rank = request.rank or 0
            return {rank: [SharedStacks(((rank, rank, 9),), "", (ThreadStack("", frames),), "", wait)]}, {}
        assert isinstance(request, ReadCollectives)
        seconds, self._last = time.monotonic() - self._last, time.monotonic()
        self._slow_looks = self._slow_looks + 1 if self.slows else 0
        self._waited += seconds / 2 if self.starves else 0.0
        slower = {0: 1.0, 2: 0.85}.get(self._slow_looks, 0.5)
        for rank in range(2):
            self._steps[rank] += 10000 * seconds * (slower if rank else 1)
        paces = {
            replica: HostPace(time.time(), (RankPace(replica, int(self._steps[replica]), self._waited * replica),))
            for replica in range(2)
        }
        return {replica: HostCollectives(0.0, pace=pace) for replica, pace in paces.items()}, self.missing


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_EVERY", "_EVERY_SUSPECTED", "FIRST_PACE", "_ROUND_EVERY"):
        monkeypatch.setattr(slow_watch, name, 0.01)
    monkeypatch.setattr(hang_watch, "FIRST_PACE", 0.01)
    monkeypatch.setattr(pace, "MIN_SECONDS", 0.03)
    monkeypatch.setattr(slow_watch, "_HOSTS_A_SECOND", 1 << 20)
    yield


def watched(spec: HostSpec, steps: Callable[[Hosts, HangWatch], Any]) -> Hosts:
    async def main() -> Hosts:
        hosts = Hosts(spec)
        watch = HangWatch(cast(JobHosts, hosts))
        running = asyncio.ensure_future(watch.run())
        await steps(hosts, watch)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return hosts

    return asyncio.run(asyncio.wait_for(main(), WITHIN))


def looks(hosts: Hosts) -> int:
    return sum(isinstance(request, ReadCollectives) for request in hosts.asked)


def test_a_verdict_is_reported_once_and_its_end_too_and_the_hook_gets_it(tmp_path: Path) -> None:
    told = tmp_path / "told"

    async def steps(hosts: Hosts, watch: HangWatch) -> None:
        await until_async(lambda: looks(hosts) > 10, "looks")
        assert hosts.reporter.notes == [] and looks(hosts) == len(hosts.asked)  # no rank is interrupted
        hosts.slows = True
        await until_async(lambda: hosts.reporter.notes and told.exists() and told.read_text(), "the verdict")
        seen = looks(hosts)
        await until_async(lambda: looks(hosts) > seen + 5, "looks")
        # Of both ranks at the first four paces; the fifth one decides.
        assert len(hosts.asked) - looks(hosts) == 2 * 4 * slow_watch._ROUNDS
        hosts.slows = False
        await until_async(lambda: len(hosts.reporter.notes) > 1, "the end")

    hosts = watched(HostSpec(hang_after=0.0, on_slow=f"cat > {told}", app="job-1"), steps)
    assert hosts.reporter.kinds == ["slow", "slow_end"]
    _, line, fields = hosts.reporter.notes[0]
    assert ": rank 1 (n1), " in line and ", blocked on a file: /mnt/x, train.py:3; " in line
    assert fields["slowness"]["message"] == line and fields["slowness"]["ranks"] == (1,)
    assert hosts.reporter.notes[1][1].startswith("slow no more: rank 1 (n1); ")
    found = json.loads(told.read_text())
    assert (found["id"], found["kind"], found["path"], found["message"]) == ("job-1", "file", "/mnt/x", line)


def test_no_stacks_are_taken_of_a_rank_that_has_hardly_any_processor() -> None:
    async def steps(hosts: Hosts, watch: HangWatch) -> None:
        hosts.starves = True
        await until_async(lambda: looks(hosts) > 3, "looks")
        hosts.slows = True
        await until_async(lambda: hosts.reporter.notes, "the verdict")

    hosts = watched(HostSpec(hang_after=0.0), steps)
    assert len(hosts.asked) == looks(hosts) and ", waiting for a processor; " in hosts.reporter.notes[0][1]


def test_stacks_are_taken_at_irregular_times_that_are_no_multiple_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def steps(hosts: Hosts, watch: HangWatch) -> None:
        monkeypatch.setattr(slow_watch, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        hosts.slows = True
        await until_async(lambda: hosts.reporter.notes, "the verdict")

    watched(HostSpec(hang_after=0.0), steps)
    assert len(set(pauses)) == len(pauses) >= slow_watch._ROUNDS


def test_nothing_is_concluded_without_all_hosts_and_the_failure_of_a_hook_is_said() -> None:
    async def steps(hosts: Hosts, watch: HangWatch) -> None:
        hosts.slows, hosts.missing = True, {1: "no answer"}
        await until_async(lambda: looks(hosts) > 10, "looks")
        assert not hosts.reporter.notes
        hosts.missing = {}
        await until_async(lambda: len(hosts.reporter.notes) > 1, "the hook")

    hosts = watched(HostSpec(hang_after=0.0, on_slow="echo no >&2; exit 3"), steps)
    assert hosts.reporter.kinds == ["slow", "on_slow"]
    assert hosts.reporter.notes[1][1] == "the command of -cfg on_slow has failed: it exited with code 3: no"


@pytest.mark.parametrize(("machine", "excludes"), [(True, True), (False, False)], ids=["file", "input"])
def test_a_host_is_replaced_if_another_machine_may_help(machine: bool, excludes: bool) -> None:
    async def steps(hosts: Hosts, watch: HangWatch) -> None:
        if not machine:
            hosts.wait, hosts.frames = KernelWait("S"), (Frame("/p/data.py", 3, "fetch"),)
        hosts.slows = True
        await until_async(lambda: hosts.reporter.notes, "the verdict")
        seen = looks(hosts)
        await until_async(lambda: looks(hosts) > seen + 1, "a look")

    hosts = watched(HostSpec(hang_after=0.0, slow_hosts="replace", spares=1), steps)
    pending = hosts.events.pending
    assert [type(event) for event in pending] == [HostExcluded] * excludes
    assert hosts.reporter.recorded == [{"kind": "node_fault", "node": "n1", "fault": "slow"}] * machine
    for event in pending:
        assert event.saves and event.replica == 1 and event.result.reason.startswith("n1 is excluded: slow since ")
