# SPDX-License-Identifier: BSD-3-Clause
"""The history of what ranks use is bounded, survives damage, and becomes curves."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from tests.waits import WITHIN
from torchx_monarch.controller.host_messages import SampleRanks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rank_clients import recording_samples
from torchx_monarch.insight.rank_sample import DeviceUse, RankSample
from torchx_monarch.insight.report_page import curves
from torchx_monarch.insight.sample_log import RankUse, SampledMoment, SampleLog, read
from torchx_monarch.insight.timeline import Span

JOB = Span("job", "job", 100.0, 200.0)


def sample(rank: int, time: float, cpu: float = 1.0) -> RankSample:
    devices = (DeviceUse(0, "gpu", 0.5, 5, 10),)
    return RankSample(time, rank, 0, 0, "a", 7, 0, "running", 90.0, cpu, 1 << 30, devices=devices)


def test_moments_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    log = SampleLog(str(path))
    log.append([sample(1, 101.0, 2.123), sample(0, 101.0)])
    log.append([dataclasses.replace(sample(0, 103.0), state="ended")])
    log.append([sample(0, 106.0)])
    assert read(path) == [
        SampledMoment(101.0, 0, (RankUse(0, 1.0, 1 << 30, 5), RankUse(1, 2.12, 1 << 30, 5))),
        SampledMoment(106.0, 0, (RankUse(0, 1.0, 1 << 30, 5),)),
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    SampleLog(str(tmp_path / "no" / "folder")).append([sample(0, 1.0)])  # is lost
    assert read(tmp_path / "none") == []


def test_a_full_file_is_thinned_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    log = SampleLog(str(path), limit=2000)
    for at in range(500):
        log.append([sample(0, 100.0 + at)])
    times = [moment.time for moment in read(path)]
    assert path.stat().st_size <= 2100 and len(times) > 10
    assert times[0] == 100.0 and times[-1] > 560.0 and times == sorted(times)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '{"time": 1, "attempt": 0}',
        '{"time": "1", "attempt": 0, "ranks": []}',
        '{"time": 1, "attempt": 0, "ranks": [[0, 1, 2]]}',
        '{"time": 1, "attempt": 0, "ranks": [[0, 1, 2, -5]]}',
        '{"time": NaN, "attempt": 0, "ranks": []}',
        '{"time": 1, "attempt": 0, "ranks": 5}',
    ],
)
def test_lines_that_are_none_are_skipped(line: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f'{line}\n{{"time": 1, "attempt": 0, "ranks": []}}\n')
    assert read(path) == [SampledMoment(1, 0, ())]


def test_curves_of_few_and_of_many_ranks() -> None:
    few = [
        SampledMoment(110.0 + at, at // 3, tuple(RankUse(rank, at * 0.5, 1 << 30, 0) for rank in (0, 1)))
        for at in range(6)
    ]
    memory, busy = curves(few, JOB)
    assert memory.most == "1.00 GiB" and [line.name for line in memory.lines] == ["rank 0", "rank 1"]
    assert memory.lines[0].parts == ["100.0,0.0 110.0,0.0 120.0,0.0", "130.0,0.0 140.0,0.0 150.0,0.0"]
    assert busy.most == "0.50" and [part.count(",") for part in busy.lines[0].parts] == [2, 2]
    many = [SampledMoment(110.0 + at, 0, tuple(RankUse(rank, 0, rank, 0) for rank in range(1, 20))) for at in (0, 1)]
    (memory,) = curves(many, JOB)
    assert [line.name for line in memory.lines] == ["lowest", "middle", "highest"]
    assert curves(few[:1], JOB) == [] and curves([], JOB) == []
    long = [SampledMoment(100.0 + at / 100, 0, (RankUse(0, at, 5, 0),)) for at in range(10000)]
    assert sum(part.count(",") for part in curves(long, JOB)[0].lines[0].parts) <= 600


def test_the_recorder_asks_while_ranks_run(tmp_path: Path) -> None:
    asked = asyncio.Event()

    class OneHost:
        present = (None,)

        async def collect(self, request: object, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
            assert request == SampleRanks(groups=False)  # which the log does not have, and ranks are not disturbed
            asyncio.get_running_loop().call_soon(asked.set)
            return {0: [sample(0, 101.0)]}, {}

    async def run() -> None:
        log = SampleLog(str(tmp_path / "samples.jsonl"))
        with recording_samples(cast(JobHosts, OneHost()), log, every=0.0):
            await asyncio.wait_for(asked.wait(), WITHIN)
            await asyncio.sleep(0)
        with recording_samples(cast(JobHosts, OneHost()), None):
            pass
        assert len(asyncio.all_tasks()) <= 2

    asyncio.run(run())
    assert read(tmp_path / "samples.jsonl")
