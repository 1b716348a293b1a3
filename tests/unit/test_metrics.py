# SPDX-License-Identifier: BSD-3-Clause
"""The metrics of a job and of its ranks, read by Prometheus' own parser."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from torchx_monarch.cli import metrics
from torchx_monarch.cli.metrics import Family, rank_families, render
from torchx_monarch.insight import timeline
from torchx_monarch.insight.rank_sample import DeviceUse, GroupStatus, RankSample
from torchx_monarch.schedulers.job_status import JobStatus

JOB = JobStatus("monarch_local://torchx/app-1", "app", "RUNNING", submitted=1000.0, elapsed=29.5, restarts=1, hosts=2)
EVENTS: list[dict[str, Any]] = [
    {"time": 1000.0, "kind": "submitted", "message": "", "seconds": 0.5},
    {"time": 1002.0, "kind": "job_started", "message": ""},
    {"time": 1003.0, "kind": "hosts", "message": "", "role": 'r"\\\n'},
    {"time": 1004.0, "kind": "ranks", "message": "", "role": 'r"\\\n', "attempt": 0},
    {"time": 1010.0, "kind": "failure", "message": "hunter2", "role": 'r"\\\n', "rank": 1},
    {"time": 1011.0, "kind": "rank_restart", "message": "hunter2", "role": 'r"\\\n', "code": 1},
    {"time": 1012.0, "kind": "ranks", "message": "", "role": 'r"\\\n', "attempt": 1},
]


def values(families: list[Family]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = [sample for family in parse(render(families)) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def labelled(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset({"job": "app-1", **labels}.items())


def test_a_job_has_the_metrics_of_its_status_and_its_phases() -> None:
    drawn = timeline.build(EVENTS, ['r"\\\n'], end=1030.0)
    families = metrics.job_families(JOB, drawn, "app-1")
    found = values(families)
    assert found["torchx_monarch_job_elapsed_seconds", labelled()] == 29.5
    assert found["torchx_monarch_job_restarts_total", labelled()] == 1
    assert found["torchx_monarch_job_state", labelled(state="RUNNING")] == 1
    assert found["torchx_monarch_job_state", labelled(state="FAILED")] == 0
    assert found["torchx_monarch_attempts_total", labelled(role='r"\\\n')] == 2
    running = labelled(role='r"\\\n', attempt="1", phase="running")
    assert found["torchx_monarch_phase_seconds_total", running] == 6
    phases = [value for (name, _), value in found.items() if name == "torchx_monarch_phase_seconds_total"]
    assert sum(phases) == pytest.approx(drawn.job.seconds)
    assert "hunter2" not in render(families)
    assert not [name for name, _ in found if name == "torchx_monarch_job_ended_timestamp_seconds"]


def test_control_characters_of_a_name_do_not_reach_the_terminal() -> None:
    family = Family("torchx_monarch_x", "x")
    family.add({"role": "\x1b[31m\udcff\n"}, 1)
    assert render([family]).splitlines()[2] == r'torchx_monarch_x{role="\\x1b[31m\\udcff\n"} 1'


def test_names_end_in_their_unit() -> None:
    drawn = timeline.build(EVENTS, ["r"], end=1030.0)
    families = metrics.job_families(JOB, drawn, "j")
    counted = {"torchx_monarch_job_state", "torchx_monarch_job_exit_code", "torchx_monarch_job_hosts"}
    names = {family.name for family in families} - counted - {"torchx_monarch_job_ranks"}
    assert all(re.fullmatch(r"torchx_monarch_[a-z_]+(_total|_seconds|_bytes)", name) for name in names)


def sample(rank: int, **more: Any) -> RankSample:
    at = {"replica": 0, "host": "node7", "pid": 100 + rank, "attempt": 2, "state": "running"}
    usage = {"time": 5.0, "started": 1.0, "cpu_seconds": 1.5, "rss_bytes": 10}
    return RankSample(**{"rank": rank, "local_rank": rank, **at, **usage, **more})


def test_ranks_are_added_up_and_shown_one_by_one_on_request() -> None:
    device = DeviceUse(0, "H100", 0.5, 1 << 30, 1 << 36)
    group = GroupStatus("0", "0-1", enqueued=7, completed=6)
    samples = [
        sample(0, last_output=3.0, groups=(group,), devices=(device, device)),
        sample(1, last_output=4.0, groups=(group,), state="stopped"),
    ]
    found = values(rank_families({"r": samples}, "app-1", per_rank=False))
    ours = labelled(role="r", attempt="3")
    assert found["torchx_monarch_cpu_seconds_total", ours] == 3.0
    assert found["torchx_monarch_collectives_total", ours] == 14
    assert found["torchx_monarch_gpu_memory_bytes", ours] == 2 << 30
    assert found["torchx_monarch_last_output_timestamp_seconds", ours] == 4.0
    assert found["torchx_monarch_ranks", labelled(role="r", attempt="3", state="stopped")] == 1
    assert not [labels for _, labels in found if "rank" in dict(labels)]
    more = values(rank_families({"r": samples}, "app-1", per_rank=True))
    assert found.items() <= more.items()
    rank1 = labelled(role="r", attempt="3", rank="1", host="node7")
    assert more["torchx_monarch_rank_resident_memory_bytes", rank1] == 10


def test_no_ranks_have_no_metrics() -> None:
    assert render(rank_families({"r": []}, "app-1", per_rank=True)) == ""
