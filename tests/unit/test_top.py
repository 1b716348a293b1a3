# SPDX-License-Identifier: BSD-3-Clause
"""What ``torchx monarch top`` shows in terminals of several sizes."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any

import pytest

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.cli import top
from torchx_monarch.cli.jobs import JobFacts
from torchx_monarch.cli.output import Screen
from torchx_monarch.insight import timeline
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.insight.timeline import Moment
from torchx_monarch.schedulers.job_status import JobStatus

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
