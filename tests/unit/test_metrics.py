# SPDX-License-Identifier: BSD-3-Clause
"""The metrics that a rank reports over time: what is kept of them, and what a reader accepts."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchx_monarch.cli import metrics as command
from torchx_monarch.insight import metrics
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.metrics import NAME, MetricsFile, Point, read_points, sparkline
from torchx_monarch.insight.timeline import build
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.schedulers import job_metrics

VALUES = st.dictionaries(st.sampled_from(["loss", "lr"]), st.floats(-1e9, 1e9), max_size=2)


@given(st.lists(VALUES, max_size=200))
@settings(deadline=None)
def test_no_extreme_and_no_last_value_is_lost(
    tmp_path_factory: pytest.TempPathFactory, reported: list[dict[str, float]]
) -> None:
    folder = tmp_path_factory.mktemp("rank")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metrics, "MAX_POINTS", 8)
        file = MetricsFile(str(folder))
        for step, values in enumerate(reported):
            file.add(step, 100.0 + step, values, checkpoint=step // 10)
            points = read_points(str(folder))  # as they are after each call
            assert len(points) <= 8
            assert (points[-1].step, points[-1].time, sum(point.calls for point in points)) == (
                step,
                100.0 + step,
                step + 1,
            )
            assert points[-1].checkpoint == step // 10
            for name in ("loss", "lr"):
                before = [value[name] for value in reported[: step + 1] if name in value]
                kept = [point.metrics[name] for point in points if name in point.metrics]
                assert bool(before) == bool(kept)
                if before:
                    assert min(low for low, _, _ in kept) == min(before)
                    assert max(high for _, high, _ in kept) == max(before)
                    assert kept[-1][2] == before[-1]
        file.close()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1, 2.0, 1, {}",
        b"{}",
        b"[1, 2.0, 1, {}]",
        b'[1, 2.0, 1, {"loss": [1, 2]}, {}, [], null]',
        b'[1, 2.0, 1, {"loss": [1, 2, null]}, {}, [], null]',
        b'["1", 2.0, 1, {}, {}, [], null]',
        b"[1, 2.0, 1, [], {}, [], null]",
        b'[1, 2.0, 1, {}, {}, [], "7"]',
        b"[" * 10000,
    ],
)
def test_what_is_no_point_is_left_out(tmp_path: Path, line: bytes) -> None:
    good = Point(3, 5.0, 1, {"a": (1.0, 2.0, 1.5)})
    (tmp_path / NAME).write_bytes(line + b"\n" + good.line() + b"   \n")
    assert read_points(str(tmp_path)) == [good]


def test_a_hostile_file(tmp_path: Path) -> None:
    assert read_points(str(tmp_path)) == []
    (tmp_path / NAME).write_text(json.dumps([1, 2.0, 1, {"\x1b[31m" + "x" * 99: [1, 1, 1]}, {}, [], None]))
    ((name, _),) = read_points(str(tmp_path))[0].metrics.items()
    assert "\x1b" not in name and len(name) < 99
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to("/etc/passwd")
    assert read_points(str(tmp_path)) == []
    MetricsFile(str(tmp_path)).add(1, 2.0, {})  # refuses to write through the link
    assert (tmp_path / NAME).is_symlink()


def test_a_metric_with_the_name_of_another_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"time": (1.0, 2.0, 3.0), "loss": (4.0, 5.0, 6.0), "loss_min": (7.0, 8.0, 9.0)}
    attempt = job_metrics.AttemptMetrics("r", 0, 1, 0, [Point(5, 100.0, 1, values)])
    job = Mock(**{"read.return_value": Mock(metrics=[attempt])})
    monkeypatch.setattr(command, "opened_job", lambda _: contextlib.nullcontext(job))
    command.run(argparse.Namespace(handle="s://x/a", names=[], activity=False, rank=None, json=False))
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    fixed = {"role": "r", "run": "", "attempt": "1", "rank": "0", "step": "5", "time": "100.000"}
    own = {"metric_time": "3.0", "time_min": "1.0", "time_max": "2.0", "loss": "6.0", "loss_min": "4.0"}
    more = {"loss_max": "5.0", "metric_loss_min": "9.0", "loss_min_min": "7.0", "loss_min_max": "8.0"}
    assert row == {**fixed, **own, **more}


def test_sparkline() -> None:
    assert sparkline([1.0], 8) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0], 8) == "▁▁"
    assert len(sparkline([float(k) for k in range(100)], 24)) == 24


def test_the_file_of_an_attempt_that_has_ended_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Event] = [
        {"time": 1.0, "kind": "hosts", "message": "", "role": "r"},
        {"time": 2.0, "kind": "ranks", "message": "", "role": "r", "log_attempt": 0},
        {"time": 3.0, "kind": "rank_restart", "message": "", "role": "r"},
        {"time": 4.0, "kind": "ranks", "message": "", "role": "r", "log_attempt": 1},
    ]
    timeline = build(happened, [RoleSpec("r", workload=WorkloadKind.RANKS)], end=9.0)
    folders, read = [tmp_path / f"r/0/attempt_{attempt}/0" for attempt in (0, 1)], list[str]()
    for folder in folders:
        folder.mkdir(parents=True)
    files = [MetricsFile(str(folder)) for folder in folders]

    def read_counted(folder: str, below: str, name: str) -> list[Point]:
        read.append(folder)
        return read_points(folder, below=below, name=name)

    monkeypatch.setattr(job_metrics, "read_points", read_counted)
    for step in range(3):
        files[min(step, 1)].add(step, 100.0 + step, {"loss": 1.0})
        os.utime(folders[0] / NAME, (1.0, 1.0))
        found = job_metrics.read_metrics(str(tmp_path), timeline)
    assert [[point.step for point in attempt.points] for attempt in found] == [[0], [1, 2]]
    assert read == [str(folders[at]) for at in (0, 1, 1, 1)]
    for file in files:
        file.close()
