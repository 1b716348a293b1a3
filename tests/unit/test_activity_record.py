# SPDX-License-Identifier: BSD-3-Clause
"""What is kept of what ranks do: by whom, how much, and how it is drawn."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from tests.unit.test_timeline import RESTARTED, ROLE
from tests.waits import WITHIN, until_async
from torchx_monarch.controller import activity_record
from torchx_monarch.controller.activity_record import ActivityRecord, point_of
from torchx_monarch.controller.host_messages import SampleRanks
from torchx_monarch.controller.hosts import Answers, JobHosts
from torchx_monarch.insight import metrics
from torchx_monarch.insight.group_calls import GroupStatus, group_calls
from torchx_monarch.insight.metrics import ACTIVITY, MAX_ROWS, MetricsFile, Point, read_points
from torchx_monarch.insight.rank_sample import RankSample, RankSamples, RankView
from torchx_monarch.insight.report_page import curves, late_rows
from torchx_monarch.insight.timeline import Moment, Span, Timeline, build
from torchx_monarch.schedulers.job_metrics import read_activity

GIB = 1 << 30


def view(rank: int, late: float | None, gib: float, **more: Any) -> RankView:
    return RankView(
        rank, rank // 2, f"node{rank // 2}", 100 + rank, "running", rss_bytes=int(gib * GIB), late_by=late, **more
    )


def test_a_point_has_the_median_the_limits_and_the_outlier() -> None:
    ranks = [view(0, 0.0, 1.0), view(1, 0.1, 1.1), view(2, 0.0, 1.0), view(3, None, 4.0)]
    point = point_of(ranks, 50.0)
    assert point.metrics["memory GiB"] == pytest.approx((1.0, 4.0, 1.05))
    assert point.metrics["lateness s"] == (0.0, 0.1, 0.0) and list(point.late) == [0.0, 0.1, 0.0, 0.0]
    assert point.outliers == {"memory GiB": "rank 3 on node1", "lateness s": "rank 1 on node0"}
    assert "CPU cores" not in point.metrics and "GPU busy" not in point.metrics
    many = point_of([view(rank, rank / 1000, 1.0) for rank in range(200)], 50.0)
    assert len(many.late) == MAX_ROWS and (many.late[0], many.late[-1]) == (0.002, 0.199)
    assert not point_of([], 1.0).late
    ended = [dataclasses.replace(view(rank, None, 0.0), state=state) for rank, state in enumerate(("ended", "zombie"))]
    assert point_of([*ended, view(2, None, 1.0)], 1.0).metrics == {"memory GiB": (1.0, 1.0, 1.0)}


def test_what_joined_points_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_POINTS", 4)
    file = MetricsFile(str(tmp_path), ACTIVITY)
    for at in range(40):
        late = 0.5 if at == 17 else 0.001
        file.add_point(
            point_of([view(0, 0.0, 1.0), view(1, late, 2.0), view(2, 0.0, 9.0 if at == 3 else 1.0)], float(at))
        )
    points = read_points(str(tmp_path), name=ACTIVITY)
    assert len(points) <= 4 and sum(point.calls for point in points) == 40
    assert max(point.metrics["memory GiB"][1] for point in points) == 9.0 and max(p.late[1] for p in points) == 0.5
    first = points[0]
    assert first.metrics["memory GiB"][1] == 9.0 and first.outliers["memory GiB"] == "rank 2 on node1"


@pytest.mark.parametrize("more", [b'{}, ["x"], null', b"[], [], null", b"{}, []", b"{}, [], null, 1"])
def test_what_is_no_activity_is_left_out(tmp_path: Path, more: bytes) -> None:
    (tmp_path / ACTIVITY).write_bytes(b"[1, 2.0, 1, {}, " + more + b"]\n")
    assert read_points(str(tmp_path), name=ACTIVITY) == []


def samples(rank: int, seconds: float, late: float) -> str:
    """The samples of a host with one rank of two, which has used ``seconds`` of a processor."""
    times: dict[str, Any] = {"time": 100 + seconds, "started": 1.0, "cpu_seconds": seconds}
    sample = RankSample(rank, rank, f"node{rank}", 7, "running", GIB, local_rank=0, attempt=0, **times)
    group = GroupStatus("0", "0-1", 8, 8, calls=tuple(number + late for number in range(1, 9)))
    return RankSamples((dataclasses.replace(sample, collectives=8),), group_calls({rank: [group]}, 200.0)).to_text()


def _open_below(folder: Path) -> list[str]:
    return [file.path for file in psutil.Process().open_files() if file.path.startswith(f"{folder}/")]


def test_each_attempt_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_record, "_EVERY", 0.001)
    place: list[Path | None] = [None]
    taken = 0

    async def collect(request: SampleRanks) -> Answers[str]:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise OSError("a fault")
        return Answers({0: samples(0, taken, 0.0), 1: samples(1, 2.0 * taken, 0.25)}, {})

    hosts = SimpleNamespace(members=SimpleNamespace(are_together=True), collect_shared=collect)
    places = [tmp_path / name for name in ("attempt_0", "attempt_1")]

    async def main() -> None:
        record = ActivityRecord(cast(JobHosts, hosts), lambda: str(place[0]) if place[0] else None)
        running = asyncio.ensure_future(record.run())
        for folder in places:
            folder.mkdir()
            place[0] = folder
            while len(read_points(str(folder), name=ACTIVITY)) < 5:
                await asyncio.sleep(0.001)
        place[0] = None
        await until_async(lambda: not _open_below(tmp_path), "the end of the last attempt")
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), WITHIN))
    for folder in places:
        last = read_points(str(folder), name=ACTIVITY)[-1]
        assert last.late == pytest.approx((0.0, 0.25))
        assert last.metrics["memory GiB"] == (1.0, 1.0, 1.0) and last.outliers["lateness s"].startswith("rank ")
        assert last.metrics["CPU cores"] == pytest.approx((1.0, 1.0, 1.0))


def test_how_it_is_drawn(tmp_path: Path) -> None:
    timeline = build(RESTARTED, ROLE, end=999.0)
    for attempt, at in ((0, (107.0, 109.0)), (1, (112.0, 119.0))):
        folder = tmp_path / "t" / "0" / f"attempt_{attempt}"
        folder.mkdir(parents=True)
        file = MetricsFile(str(folder), ACTIVITY)
        for time in at:
            file.add_point(point_of([view(0, 0.0, 1.0), view(1, 0.4 * attempt, 2.0), view(2, 0.001, 1.0)], time))
    activity = read_activity(str(tmp_path), timeline)
    assert [(found.role, found.attempt, found.rank) for found in activity] == [("t", 1, None), ("t", 2, None)]
    shown = activity[1].to_json()["points"][0]
    assert shown["metrics"]["lateness s"] == {"min": 0.0, "max": 0.4, "median": 0.001}
    assert shown["late"] == (0.0, 0.4, 0.001) and shown["outliers"]["memory GiB"] == "rank 1 on node0"
    points = [found.points for found in activity]
    rows = late_rows(points, timeline, "t")
    assert [(row.label, row.most) for row in rows] == [("rank 0", 0.0), ("rank 1", 0.4), ("rank 2", 0.001)]
    columns = [column for column, share in rows[1].cells if share == 1.0]
    assert columns == [*range(int(64 * 12 / 21), int(64 * 19 / 21) + 1)] and not rows[2].cells
    (memory, _) = curves(points, over=timeline.job)
    assert (memory.begin, memory.end, memory.low, memory.high) == ("0 s", "21.0 s", 1.0, 2.0)
    assert memory.outlier == "rank 1 on node0" and len(memory.starts) == 1
    moments = [Moment(115.0, "hang", "hang: rank 1"), Moment(100.5, "slow", "slow"), Moment(110.6, "failure", "")]
    (memory, _) = curves(points, over=timeline.job, moments=moments)
    assert [(place, moment.kind) for place, moment in memory.marks] == [
        (571.4, "hang")
    ]  # at the last value, 12 of 21 s
    reported = [
        Point(step, 100.0 + step, 1, {"loss": (1.0, 1.0, 1.0)}, checkpoint=step // 8 * 8 or None) for step in range(21)
    ]
    (loss,) = curves([reported], moments=moments)
    assert [place for place, _ in loss.marks] == [750.0, 0.0] and loss.checkpoints == [400.0, 800.0]
    (loss,) = curves([reported], [reported])
    assert not loss.checkpoints and [job for job, _ in loss.lines] == [0, 1]
    (loss,) = curves([reported], over=timeline.job)
    assert loss.checkpoints == [381.0, 761.9] and (loss.begin, loss.end) == ("0 s", "21.0 s")
    assert late_rows([[Point(0, 105.0, 1, {}, {}, (0.0, 0.0005))]], timeline, "t") == []


@pytest.mark.parametrize(("rows", "last"), [(8, "rank 7"), (64, "ranks 126-127")])
def test_of_which_ranks_a_row_tells_whatever_other_roles_and_attempts_there_are(rows: int, last: str) -> None:
    job = Span("job", "job", 0.0, 10.0)
    attempts = [Span("attempt", f"attempt {at}", 0.0, 10.0, job, role) for at, role in ((1, "t"), (2, "t"), (1, "u"))]
    sizes = (128 if rows == 64 else rows, 4, 12)  # of the elastic role "t" half is lost
    ranks = [
        Span("rank", f"rank {rank}", 0.0, 10.0, attempt, attempt.role, rank)
        for attempt, size in zip(attempts, sizes, strict=True)
        for rank in range(size)
    ]
    points = [Point(0, at, 1, {}, {}, tuple(row / 64 for row in range(rows))) for at in (2.0, 4.0)]
    found = late_rows([points], Timeline((job, *attempts, *ranks)), "t")
    assert len(found) == min(rows, 16) and found[-1].label == last and json.dumps(found)
