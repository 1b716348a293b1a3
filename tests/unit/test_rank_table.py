# SPDX-License-Identifier: BSD-3-Clause
"""What ranks do, from their samples, and what ``torchx monarch top`` shows of it in terminals of several sizes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.cli import top
from torchx_monarch.cli.jobs import JobFacts
from torchx_monarch.cli.output import Screen
from torchx_monarch.cli.status import render
from torchx_monarch.cli.top import rank_table, show_bytes
from torchx_monarch.host.ranks.rank_recorder import format_ranks
from torchx_monarch.insight import timeline
from torchx_monarch.insight.group_calls import Collective, GroupStatus, group_calls, lateness
from torchx_monarch.insight.rank_sample import (
    DeviceUse,
    Progress,
    RankSample,
    RankSamples,
    RankView,
    rank_views,
    read_samples,
)
from torchx_monarch.insight.timeline import Moment
from torchx_monarch.schedulers.job_status import JobStatus


@dataclass(frozen=True)
class Rank:
    """What a host knows of a rank at one moment."""

    sample: RankSample
    groups: tuple[GroupStatus, ...] = ()


def sample(rank: int, time: float = 100.0, groups: tuple[GroupStatus, ...] = (), **more: Any) -> Rank:
    values: dict[str, Any] = {"local_rank": rank % 8, "replica": rank // 8, "host": f"node{rank // 8}"}
    values.update(pid=1000 + rank, attempt=0, state="running", started=50.0, cpu_seconds=10.0, rss_bytes=300 << 20)
    return Rank(RankSample(rank, time=time, **{**values, **more}), groups)


def as_received(ranks: Iterable[Rank]) -> RankSamples:
    """The samples of ranks as a client gets them of the hosts."""
    by_host: dict[int, list[Rank]] = {}
    for rank in ranks:
        by_host.setdefault(rank.sample.replica, []).append(rank)
    texts = []
    for host in by_host.values():
        samples = tuple(rank.sample.with_activity(rank.groups, rank.sample.progress) for rank in host)
        calls = group_calls({rank.sample.rank: rank.groups for rank in host}, host[0].sample.time)
        texts.append(RankSamples(samples, calls).to_text())
    return read_samples(texts)


def views(ranks: Iterable[Rank], before: Iterable[Rank] = ()) -> list[RankView]:
    return rank_views(as_received(ranks), as_received(before))


def group(enqueued: int, called: float = 0.0, name: str = "0", ranks: tuple[int, ...] = (0, 1, 2)) -> GroupStatus:
    waiting = Collective(enqueued, "gloo:all_reduce", called=called) if called else None
    return GroupStatus(name, format_ranks(ranks), enqueued, enqueued - bool(called), waiting)


def test_late_is_the_rank_for_which_others_wait() -> None:
    other = group(1, called=10.0, name="1", ranks=(0, 3))
    samples = [
        sample(0, groups=(group(6, called=95.0), other)),
        sample(1, groups=(group(5),)),
        sample(2, groups=(group(6, called=99.0),)),
        sample(3, groups=(group(1, called=11.0, name="1", ranks=(0, 3)),)),
    ]
    assert [row.waited_for for row in views(samples)] == [None, 5.0, None, None]


def test_ranks_of_a_host_are_folded() -> None:
    device = DeviceUse(0, "H100", 0.5, 8 << 30, 80 << 30)
    before = [sample(rank, 99.0, cpu_seconds=9.0, groups=(group(1),)) for rank in range(16)]
    after = [sample(rank, groups=(group(3 + rank),), devices=(device,)) for rank in range(15)]
    after.append(sample(15, state="stopped", last_line="the last"))
    _, first, second = rank_table(views(after, before), 120, by_host=True)
    assert first.split() == ["0-7", "node0", "running", "800%", "2.3G", "50%", "64G", "2.0"]
    assert "7 running, 1 stopped" in second and second.endswith("  the last")


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = "epoch 3/8 loss 0.123 \x1b[31m" + "x" * 200
    device = DeviceUse(0, "H100", 1.0, 70 << 30, 80 << 30)
    samples = [sample(rank, last_line=text, devices=(device,), groups=(group(9, 1.0),)) for rank in range(256)]
    lines = rank_table(views(samples, [sample(rank, 99.0) for rank in range(256)]), width)
    assert len(lines) == 257 and max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines) and "epoch" in lines[1]
    folded = rank_table(views(samples), width, by_host=True)
    assert len(folded) == 33 and max(map(len, folded)) <= width


def test_a_table_for_people() -> None:
    before = [sample(rank, 98.0, cpu_seconds=8.0, groups=(group(10),)) for rank in range(3)]
    after = [
        sample(0, groups=(group(310, called=96.5),), last_line="step 31 loss 0.42"),
        sample(1, groups=(group(309),), state="stopped", cpu_seconds=8.0),
        sample(2, groups=(group(310, called=97.0),), state="uninterruptible", rss_bytes=1700 << 20),
    ]
    assert rank_table(views(after, before), 80) == [
        "RANK  HOST    PID  STATE       CPU   RSS  COLL/S   LATE  LAST LINE",
        "   0  node0  1000  running    100%  300M     150         step 31 loss 0.42",
        "   1  node0  1001  stopped      0%  300M     150  3.5 s",
        "   2  node0  1002  disk wait  100%  1.7G     150",
    ]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0B"), (999, "999B"), (1000, "1.0K"), (5 << 20, "5.0M"), (300 << 20, "300M"), (3 << 40, "3.0T")],
)
def test_a_size_has_five_characters(count: int, shown: str) -> None:
    assert show_bytes(count) == shown


def calling(rank: int, time: float = 100.0, called: tuple[float, ...] = (), **more: Any) -> Rank:
    """A sample of a rank that has called collectives 1, 2, … of a group of two ranks at the given times."""
    groups = (GroupStatus("0", "0-1", len(called), len(called), calls=called),) if called else ()
    values: dict[str, Any] = {"replica": 0, "host": "node", "pid": 10 + rank, "state": "running", "rss_bytes": 1 << 30}
    values |= {"local_rank": rank, "attempt": 0, "started": 1.0, "cpu_seconds": 5.0}
    return Rank(RankSample(rank, time=time, **{**values, **more}), groups)


def late(ranks: Iterable[Rank]) -> dict[int, float]:
    return lateness(as_received(ranks).calls)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({0: (1.0, 2.0), 1: (1.5, 2.25)}, {0: 0.0, 1: 0.375}),
        ({0: (1.0, 2.0), 1: (1.5,)}, {0: 0.0, 1: 0.5}),  # it has not called the second one yet
        ({0: (1.0, 3.0), 1: (2.0, 2.0)}, {0: 0.5, 1: 0.5}),
        ({0: (1.0,), 1: ()}, {}),
        ({0: (1.0,)}, {}),  # the other rank does not answer
        ({0: (), 1: ()}, {}),
    ],
)
@pytest.mark.parametrize("hosts", [1, 2])
def test_which_rank_is_late(times: dict[int, tuple[float, ...]], expected: dict[int, float], hosts: int) -> None:
    assert late(calling(rank, called=called, replica=rank % hosts) for rank, called in times.items()) == expected


def test_collectives_that_a_sample_no_longer_tells_do_not_count() -> None:
    old = calling(0, called=(1.0, 2.0))
    new = replace(old.groups[0], calls=old.groups[0].calls[1:])
    assert late([replace(old, groups=(new,)), calling(1, called=(9.0, 2.5))]) == {0: 0.0, 1: 0.5}


def test_what_an_earlier_sample_tells_counts_too() -> None:
    before = [calling(rank, 98.0, (1.0 + rank,)) for rank in range(2)]
    now = [Rank(replace(rank.sample, time=100.0), (replace(rank.groups[0], calls=()),)) for rank in before]
    assert [view.late_by for view in views(now, before)] == [0.0, 1.0]


def test_a_rank_of_two_groups_is_as_late_as_in_the_worse_one() -> None:
    ranks = [calling(0, called=(1.0,)), calling(1, called=(2.0,))]
    twice = [replace(rank, groups=(*rank.groups, replace(rank.groups[0], name="1"))) for rank in ranks]
    assert late(twice) == {0: 0.0, 1: 1.0}


def test_rates_of_two_samples() -> None:
    before = [calling(0, 98.0, (1.0,)), calling(1, 98.0, (1.0,)), calling(2, 98.0)]
    now = [
        calling(2, cpu_seconds=6.0, pid=99),  # another process
        calling(1, called=(1.0,), cpu_seconds=0.0, state="ended"),
        calling(0, called=(1.0, 2.0, 3.0), cpu_seconds=8.0),
    ]
    found = views(now, before)
    assert [(view.rank, view.cpu, view.collectives_per_second) for view in found] == [
        *[(0, 1.5, 1.0), (1, None, None), (2, None, None)]
    ]
    assert [view.cpu for view in views(now)] == [None] * 3


def test_a_status_shows_what_ranks_do_in_a_few_lines() -> None:
    progress = Progress(20, 100, 100.0, 10, {"loss": 0.1234, "\x1b": 1.0}, 10, 90.0)
    device = DeviceUse(0, "GPU", 0.5, 1, 2)
    before = [calling(rank, 98.0, (1.0,)) for rank in range(2)]
    now = [
        calling(0, called=(1.0, 2.0, 3.0), cpu_seconds=7.0, progress=progress, last_output=99.0, devices=(device,)),
        calling(1, called=(1.2, 2.2, 3.2), cpu_seconds=7.2, rss_bytes=3 << 29, state="stopped"),
    ]
    status = JobStatus("h://s/a", "a", "RUNNING", phase="running", last_output=99.0, activity=views(now, before))
    assert render(status, 101.0).splitlines()[2:] == [
        "  last output  2.0 s ago",
        "  progress     step 20 of 100, 1 min 20 s left, checkpoint of step 10, loss 0.1234, \\x1b 1",
        "  collectives  1.0 a second",
        "  each rank    CPU 1.00-1.10 cores, memory 1.00-1.50 GiB, GPU 50 %; rank 1 is stopped",
    ]
    assert status.to_json()["activity"][0]["progress"]["step"] == 20
    hanging = [replace(view, waited_for=12.0 if view.rank == 0 else None) for view in views(now, before)]
    assert "a second; others wait for rank 0, for 12.0 s" in render(replace(status, activity=hanging), 101.0)
    quiet = [replace(view, quiet=40.0 + view.rank) for view in views(now, before)]
    said = "  collectives  no rank has called one or printed anything for 40.0 s: torchx monarch stacks h://s/a"
    assert said in render(replace(status, activity=quiet), 101.0).splitlines()
    many = [Rank(replace(now[1].sample, rank=rank, state="stopped")) for rank in range(9)]
    shown = render(replace(status, activity=views(many)), 101.0)
    assert shown.endswith("rank 2 is stopped; rank 3 is stopped; rank 4 is stopped; …")


APP = AppSnapshot("a-1", "a", [])
EMPTY = timeline.build([], [], end=1.0)
JOB = JobStatus("monarch_local://torchx/a-1", "a", "RUNNING", phase="running", elapsed=61, attempt=2, attempts=3)


def view(ranks: int, **more: Any) -> JobFacts:
    rows = [RankView(rank, 0, f"node{rank // 8}", 100 + rank, "running", last_line="x" * 300) for rank in range(ranks)]
    return JobFacts(APP, replace(JOB, activity=rows), EMPTY, **more)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 6), (300, 100)])
@pytest.mark.parametrize("by_host", [False, True])
def test_a_screen_fits_its_terminal_and_the_last_one_is_whole(
    width: int, height: int, by_host: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((width, height)))
    missing = {str(replica): "it does not answer, " * 30 for replica in range(40)}
    drawn = top.lines(view(256, missing=missing, problem="a problem " * 30), width, by_host)
    screen = Screen()
    screen.show(drawn, whole=False)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == min(height - 1, len(drawn)) and max(map(len, shown)) <= width
    if len(shown) < len(drawn):
        assert shown[:-1] == drawn[: len(shown) - 1]
        assert shown[-1] == f"… {len(drawn) - len(shown) + 1} more lines"
    screen.show(drawn, whole=True)
    assert capsys.readouterr().out == "".join([f"\x1b[{len(shown)}A\x1b[J", *(f"{line}\n" for line in drawn)])


def test_the_head_says_what_is_wrong() -> None:
    hang, failure = Moment(1.0, "hang", "rank 1 makes rank 0 wait"), Moment(1.0, "failure", "rank 1 exited")
    status = replace(JOB, hang=hang, last_failure=failure, restarts=1, hosts=1, ranks=2)
    failed = JobFacts(APP, status, EMPTY, missing={"1": "no answer"}, problem="cannot be reached")
    assert re.sub(r"\d{5,}", "N", "\n".join(top.head(failed, 200))).splitlines() == [
        "monarch_local://torchx/a-1: RUNNING for 1 min 1 s",
        "attempt 2 of 3; 2 ranks on 1 host; hang: rank 1 makes rank 0 wait; last failure N s ago: rank 1 exited; "
        "1 restart",
        "host 1: no answer",
        "cannot be reached",
    ]
    assert max(map(len, top.head(failed, 40))) <= 40
    assert json.loads(json.dumps(top.to_json(failed)))["missing"] == {"1": "no answer"}
