# SPDX-License-Identifier: BSD-3-Clause
"""The table of ranks: ranks that others wait for, hosts, and widths of terminals."""

from __future__ import annotations

from typing import Any

import pytest

from torchx_monarch.host.ranks.rank_recorder import format_ranks
from torchx_monarch.insight import rank_table
from torchx_monarch.insight.rank_sample import Collective, DeviceUse, GroupStatus, RankSample
from torchx_monarch.insight.rank_view import rank_views


def sample(rank: int, time: float = 100.0, **more: Any) -> RankSample:
    values: dict[str, Any] = {"local_rank": rank % 8, "replica": rank // 8, "host": f"node{rank // 8}"}
    values.update(pid=1000 + rank, attempt=0, state="running", started=50.0, cpu_seconds=10.0, rss_bytes=300 << 20)
    return RankSample(time, rank, **{**values, **more})


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
    assert [row.waited_for for row in rank_views(samples)] == [None, 5.0, None, None]


def test_ranks_of_a_host_are_folded() -> None:
    device = DeviceUse(0, "H100", 0.5, 8 << 30, 80 << 30)
    before = [sample(rank, 99.0, cpu_seconds=9.0, groups=(group(1),)) for rank in range(16)]
    after = [sample(rank, groups=(group(3 + rank),), devices=(device,)) for rank in range(15)]
    after.append(sample(15, state="stopped", last_line="the last"))
    _, first, second = rank_table.render(rank_views(after, before), 120, by_host=True)
    assert first.split() == ["0-7", "node0", "running", "800%", "2.3G", "50%", "64G", "2.0"]
    assert "7 running, 1 stopped" in second and second.endswith("  the last")


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = "epoch 3/8 loss 0.123 \x1b[31m" + "x" * 200
    device = DeviceUse(0, "H100", 1.0, 70 << 30, 80 << 30)
    samples = [sample(rank, last_line=text, devices=(device,), groups=(group(9, 1.0),)) for rank in range(256)]
    lines = rank_table.render(rank_views(samples, [sample(rank, 99.0) for rank in range(256)]), width)
    assert len(lines) == 257 and max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines) and "epoch" in lines[1]
    folded = rank_table.render(rank_views(samples), width, by_host=True)
    assert len(folded) == 33 and max(map(len, folded)) <= width


def test_a_table_for_people() -> None:
    before = [sample(rank, 98.0, cpu_seconds=8.0, groups=(group(10),)) for rank in range(3)]
    after = [
        sample(0, groups=(group(310, called=96.5),), last_line="step 31 loss 0.42"),
        sample(1, groups=(group(309),), state="stopped", cpu_seconds=8.0),
        sample(2, groups=(group(310, called=97.0),), state="uninterruptible", rss_bytes=1700 << 20),
    ]
    assert rank_table.render(rank_views(after, before), 80) == [
        "RANK  HOST    PID  STATE       CPU   RSS  COLL/S   LATE  LAST LINE",
        "   0  node0  1000  running    100%  300M     150         step 31 loss 0.42",
        "   1  node0  1001  stopped      0%  300M     150  3.50s",
        "   2  node0  1002  disk wait  100%  1.7G     150",
    ]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0B"), (999, "999B"), (1000, "1.0K"), (5 << 20, "5.0M"), (300 << 20, "300M"), (3 << 40, "3.0T")],
)
def test_a_size_has_five_characters(count: int, shown: str) -> None:
    assert rank_table.show_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0.00s"), (3.5, "3.50s"), (12.3, "12s"), (120.0, "2m"), (3600 * 5, "5h")],
)
def test_a_delay_has_five_characters(seconds: float, shown: str) -> None:
    assert rank_table.show_seconds(seconds) == shown
