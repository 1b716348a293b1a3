# SPDX-License-Identifier: BSD-3-Clause
"""The metrics of ranks, read by Prometheus' own parser."""

from __future__ import annotations

from typing import Any

from tests.unit.test_metrics import labelled, values
from torchx_monarch.cli.metrics import rank_families
from torchx_monarch.insight.prometheus_text import render
from torchx_monarch.insight.rank_sample import DeviceUse, GroupStatus, RankSample


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
    one = labelled(role="r", attempt="3", rank="1", host="node7")
    assert more["torchx_monarch_rank_resident_memory_bytes", one] == 10


def test_no_ranks_have_no_metrics() -> None:
    assert render(rank_families({"r": []}, "app-1", per_rank=True)) == ""
