# SPDX-License-Identifier: BSD-3-Clause
"""What ranks do, from their samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchx_monarch.cli.status_text import render
from torchx_monarch.insight.rank_sample import Collective, DeviceUse, GroupStatus, Progress, RankSample
from torchx_monarch.insight.rank_view import lateness, rank_views
from torchx_monarch.schedulers.job_status import JobStatus


def sample(rank: int, time: float = 100.0, called: tuple[float, ...] = (), **more: object) -> RankSample:
    """A sample of a rank that has called collectives 1, 2, … of a group of two ranks at the given times."""
    recent = tuple(Collective(number, "gloo:all_reduce", called=at) for number, at in enumerate(called, 1))
    groups = (GroupStatus("0", "0-1", len(called), len(called), None, recent),) if called else ()
    one = RankSample(time, rank, rank, 0, "node", 10 + rank, 0, "running", 1.0, 5.0, 1 << 30, groups=groups)
    return replace(one, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "late"),
    [
        ({0: (1.0, 2.0), 1: (1.5, 2.25)}, {0: 0.0, 1: 0.375}),
        ({0: (1.0, 2.0), 1: (1.5,)}, {0: 0.0, 1: 0.5}),  # it has not called the second one yet
        ({0: (1.0, 3.0), 1: (2.0, 2.0)}, {0: 0.5, 1: 0.5}),
        ({0: (1.0,), 1: ()}, {}),
        ({0: (1.0,)}, {}),  # the other rank does not answer
        ({0: (), 1: ()}, {}),
    ],
)
def test_which_rank_is_late(times: dict[int, tuple[float, ...]], late: dict[int, float]) -> None:
    assert lateness([sample(rank, called=called) for rank, called in times.items()]) == late


def test_collectives_that_a_sample_no_longer_tells_do_not_count() -> None:
    old = sample(0, called=(1.0, 2.0))
    new = replace(old.groups[0], recent=old.groups[0].recent[1:])
    assert lateness([replace(old, groups=(new,)), sample(1, called=(9.0, 2.5))]) == {0: 0.0, 1: 0.5}


def test_what_an_earlier_sample_tells_counts_too() -> None:
    before = [sample(rank, 98.0, (1.0 + rank,)) for rank in range(2)]
    now = [replace(one, time=100.0, groups=(replace(one.groups[0], recent=()),)) for one in before]
    assert [one.late_by for one in rank_views(now, before)] == [0.0, 1.0]


def test_a_rank_of_two_groups_is_as_late_as_in_the_worse_one() -> None:
    ranks = [sample(0, called=(1.0,)), sample(1, called=(2.0,))]
    twice = [replace(one, groups=(*one.groups, replace(one.groups[0], name="1"))) for one in ranks]
    assert lateness(twice) == {0: 0.0, 1: 1.0}


def test_rates_of_two_samples() -> None:
    before = [sample(0, 98.0, (1.0,)), sample(1, 98.0, (1.0,)), sample(2, 98.0)]
    now = [
        sample(2, cpu_seconds=6.0, pid=99),  # another process
        sample(1, called=(1.0,), cpu_seconds=0.0, state="ended"),
        sample(0, called=(1.0, 2.0, 3.0), cpu_seconds=8.0),
    ]
    found = rank_views(now, before)
    assert [(one.rank, one.cpu, one.collectives_per_second) for one in found] == [
        *[(0, 1.5, 1.0), (1, None, None), (2, None, None)]
    ]
    assert [one.cpu for one in rank_views(now, [])] == [None] * 3


def test_a_status_shows_what_ranks_do_in_a_few_lines() -> None:
    progress = Progress(20, 100, 100.0, 10, {"loss": 0.1234, "\x1b": 1.0}, 10, 90.0)
    device = DeviceUse(0, "GPU", 0.5, 1, 2)
    before = [sample(rank, 98.0, (1.0,)) for rank in range(2)]
    now = [
        sample(0, called=(1.0, 2.0, 3.0), cpu_seconds=7.0, progress=progress, last_output=99.0, devices=(device,)),
        sample(1, called=(1.2, 2.2, 3.2), cpu_seconds=7.2, rss_bytes=3 << 29, state="stopped"),
    ]
    status = JobStatus("h://s/a", "a", "RUNNING", phase="running", last_output=50.0, activity=rank_views(now, before))
    assert render(status, 101.0).splitlines()[2:] == [
        "  last output  2.0 s ago",
        "  progress     step 20 of 100, 1 min 20 s left, checkpoint of step 10, loss 0.1234, \\x1b 1",
        "  collectives  1.0 a second; rank 1 calls them last, 200 ms after the first",
        "  each rank    CPU 1.00-1.10 cores, memory 1.00-1.50 GiB, GPU 50 %; rank 1 is stopped",
    ]
    assert status.to_json()["activity"][0]["progress"]["step"] == 20
    many = [replace(one, rank=rank, state="stopped") for rank in range(9) for one in now[1:]]
    shown = render(replace(status, activity=rank_views(many, [])), 101.0)
    assert shown.endswith("rank 0 is stopped; rank 1 is stopped; rank 2 is stopped; …")
