# SPDX-License-Identifier: BSD-3-Clause
"""When the controller asks the hosts for the collectives of their ranks, and what it reports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller import hang_watch
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_messages import ReadCollectives, Request
from torchx_monarch.controller.hosts import Answers, JobHosts
from torchx_monarch.controller.members import Members
from torchx_monarch.insight.group_calls import Collective, GroupStatus
from torchx_monarch.insight.hangs import Hang, HostCollectives, RankCollectives
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.insight.stacks import SharedStacks
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console, WriterThread


class Ranks:
    """Two ranks on one host, of which rank 0 may wait for rank 1.

    Attributes:
        waited: for how many seconds it has waited.
        quiet: for how many seconds no rank has printed or called anything.
        missing: why hosts do not answer, by replica.
        asked: the requests so far.
    """

    def __init__(self, reporter: Reporter, spec: HostSpec) -> None:
        self.reporter = reporter
        self.spec = spec
        self.members = Members(1)
        self.waited = self.quiet = 0.0
        self.missing: dict[int, str] = {}
        self.asked: list[Request[Any]] = []

    async def collect_shared(self, request: Request[Any], afresh: bool) -> Answers[Any]:
        self.asked.append(request)
        return Answers({0: [SharedStacks(((1, 0, 9),), "", (), "stopped (SIGSTOP)")]}, {})

    async def collect(self, request: Request[Any]) -> tuple[dict[int, Any], dict[int, str]]:
        self.asked.append(request)
        assert isinstance(request, ReadCollectives)
        waiting = Collective(1, "gloo:barrier", (), 100 - self.waited) if self.waited else None
        first = GroupStatus("0", "0-1", 1, 0, waiting) if self.waited else GroupStatus("0", "0-1", 1, 1)
        groups = [first, GroupStatus("0", "0-1", 0 if self.waited else 1, 0)]
        ranks = [RankCollectives(rank, 100, (group,)) for rank, group in enumerate(groups)]
        read = HostCollectives.from_ranks(ranks, request.details)
        return {0: dataclasses.replace(read, longest_wait=self.waited, quiet=self.quiet)}, self.missing


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__(Console(2), None, "trainer")
        self.notes: list[tuple[str, str]] = []

    def report(self, kind: str, text: str, **fields: object) -> None:
        self.notes.append((kind, text))


def watched(
    steps: Callable[[Ranks, HangWatch], Any], on_hang: str = "observe", hang_after: float = 0.05
) -> tuple[Hang | None, Notes, Ranks]:
    async def main() -> tuple[Hang | None, Notes, Ranks]:
        notes = Notes()
        ranks = Ranks(notes, HostSpec(hang_after=hang_after, on_hang=on_hang))
        watch = HangWatch(cast(JobHosts, ranks))
        running = asyncio.ensure_future(watch.run())
        await steps(ranks, watch)
        if not running.done():
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await running, notes, ranks
        return None, notes, ranks

    return asyncio.run(asyncio.wait_for(main(), WITHIN))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "_SHORTEST", 0.005)


def looks(ranks: Ranks) -> int:
    return ranks.asked.count(ReadCollectives(False))


def test_a_hang_is_reported_once_and_its_end_too() -> None:
    async def steps(ranks: Ranks, watch: HangWatch) -> None:
        await until_async(lambda: looks(ranks) > 30, "looks")
        assert ReadCollectives(True) not in ranks.asked  # nobody waits
        ranks.waited = 60
        await until_async(lambda: ranks.asked.count(ReadCollectives(True)) > 3, "looks at details")
        ranks.waited, seen = 0, looks(ranks)
        await until_async(lambda: looks(ranks) > seen + 3, "looks")

    hang, notes, _ = watched(steps)
    assert hang is None
    assert [kind for kind, _ in notes.notes] == ["hang", "hang_end"]
    assert notes.notes[0][1].startswith(
        "hang: rank 1 has not called gloo:barrier, number 1 of group 0, in which rank 0"
    )
    assert notes.notes[0][1].endswith("; rank 1 (host 0, pid 9): stopped (SIGSTOP)")
    assert notes.notes[1][1].startswith("hang over: rank 1 made the others wait for ")


def test_that_no_rank_does_anything_is_reported_once() -> None:
    async def steps(ranks: Ranks, watch: HangWatch) -> None:
        for _ in range(2):
            ranks.quiet, seen = 60, looks(ranks)
            await until_async(lambda: looks(ranks) > seen + 9, "looks")  # noqa: B023
            ranks.quiet, seen = 0.01, looks(ranks)
            await until_async(lambda: looks(ranks) > seen + 3, "looks")  # noqa: B023

    _, notes, ranks = watched(steps)
    [first, second] = notes.notes
    assert first[0] == second[0] == "quiet" and ReadCollectives(True) not in ranks.asked
    assert first[1].startswith("no rank has called a collective or printed anything for ")
    assert first[1].endswith(" s; rank 1 (host 0, pid 9): stopped (SIGSTOP) (torchx monarch stacks)")


def test_nothing_is_concluded_without_all_hosts_or_while_the_watch_rests() -> None:
    async def steps(ranks: Ranks, watch: HangWatch) -> None:
        ranks.waited, ranks.missing = 60, {1: "no answer"}
        await until_async(lambda: looks(ranks) > 20, "looks")
        ranks.missing = {}
        with watch.rest():
            for _ in range(100):
                await asyncio.sleep(0)  # a look that has begun ends
            seen = len(ranks.asked)
            await asyncio.sleep(0.1)
            assert len(ranks.asked) == seen
        assert not ranks.asked.count(ReadCollectives(True))
        await until_async(lambda: ranks.asked.count(ReadCollectives(True)), "a look at details")

    _, notes, _ = watched(steps)
    assert len(notes.notes) <= 1


def test_a_watch_that_is_off_asks_nobody() -> None:
    async def steps(ranks: Ranks, watch: HangWatch) -> None:
        await asyncio.sleep(0.05)

    assert watched(steps, hang_after=0)[2].asked == []


def test_a_watch_goes_on_after_an_error_which_it_reports_once(capfd: pytest.CaptureFixture[str]) -> None:
    async def steps(ranks: Ranks, watch: HangWatch) -> None:
        ranks.waited = cast(Any, "60")
        await until_async(lambda: looks(ranks) > 3, "looks")
        ranks.waited = 60
        await until_async(
            lambda: not all(isinstance(request, ReadCollectives) for request in ranks.asked), "a request for stacks"
        )
        ranks.waited = cast(Any, "60")
        seen = looks(ranks)
        await until_async(lambda: looks(ranks) > seen + 3, "looks")

    _, notes, _ = watched(steps)
    assert [kind for kind, _ in notes.notes] == ["hang"]
    WriterThread.finish()
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[monarch] ")]
    assert line.startswith("[monarch] the watch for hangs goes on after an error: TypeError: ")
