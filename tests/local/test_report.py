# SPDX-License-Identifier: BSD-3-Clause
"""The report of a real job, with a restart and a failure, also in a real browser."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.tools import browser
from tests.local.test_cli import run, torchx, write
from torchx_monarch.insight import events
from torchx_monarch.insight.account import lost_seconds
from torchx_monarch.insight.timeline import build
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.schedulers.recorded_apps import recorded_apps

_PROGRAM = """
import pathlib, torch.distributed as dist, torch
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(7))
print("all there", flush=True)
attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
import torchx_monarch
for step in range(3):
    torchx_monarch.progress(step + attempt, checkpoint=step // 2, loss=1 / (1 + step))
dist.barrier()
if rank == 1:
    pathlib.Path(f"failed_{attempt}").write_text(str(time.time()))
    raise ValueError(f"<script>alert({attempt})</script>")
pathlib.Path(f"began_{attempt}_{rank}").write_text(str(time.time()))
time.sleep(1000)
"""

ROLE = [RoleSpec("prog", workload=WorkloadKind.RANKS)]


@dataclass
class Job:
    """A job that has failed after a restart, its page, and its events."""

    work: Path
    page: Path
    happened: list[events.Event]


def test_the_report_of_a_job(tmp_path: Path) -> None:
    name = write(tmp_path, _PROGRAM)
    words = ("--wait", "-cfg", "grace=2", "monarch.spmd", "-j", "1x2", "--max_restarts", "1", "--name", "r", name)
    run(*words, cwd=tmp_path, check=False)
    page = tmp_path / "job.html"
    told = json.loads(torchx("monarch", "report", "last", "-o", str(page), "--json").stdout)
    assert (told["path"], told["state"]) == (str(page), "FAILED")
    assert sum(told["roles"]["prog"]["phases"].values()) == pytest.approx(told["seconds"])
    paths = list(Path(os.environ["MONARCH_STATE_DIR"]).glob("apps/*/events.jsonl"))
    assert len(paths) == 1
    job = Job(tmp_path, page, events.read_detailed(paths[0]))
    phases_add_up(job)
    lost_time_is_that_of_the_outage(job)
    page_tells_all(job)
    rows = torchx("monarch", "metrics", "last", "loss").stdout.splitlines()
    assert rows[0] == "role,run,attempt,rank,step,time,loss,loss_min,loss_max" and len(rows) == 7
    assert rows[-1].startswith("prog,,2,0,3,") and rows[-1].endswith(",0.3333333333333333" * 3)
    shown = json.loads(torchx("monarch", "metrics", "last", "--json").stdout)
    from torchx_monarch import SPMDJob

    assert SPMDJob.attach(recorded_apps()[0].handle).metrics() == shown


def phases_add_up(job: Job) -> None:
    drawn = build(job.happened, ROLE, end=job.happened[-1]["time"])
    whole = job.happened[-1]["time"] - job.happened[0]["time"] + job.happened[0]["seconds"]
    assert sum(span.seconds for span in drawn.spans_of("phase")) == pytest.approx(whole, rel=0.02)
    assert {"queued", "hosts", "ranks", "first output", "stopping"} <= {span.name for span in drawn.spans_of("phase")}
    assert [span.name for span in drawn.spans_of("attempt")] == ["attempt 1", "attempt 2"]
    codes = [span.code for span in drawn.spans_of("rank")]
    assert len(codes) == 4 and codes.count(1) == 2
    assert len(drawn.spans_of("import")) == 1  # once for each host


def lost_time_is_that_of_the_outage(job: Job) -> None:
    """From the failure until the ranks of the next attempt run, and from the last failure to the end."""
    lost = lost_seconds(build(job.happened, ROLE, end=job.happened[-1]["time"]), "prog")
    failed = [event["failed_at"] for event in job.happened if event["kind"] == "failure"]
    assert len(failed) == 2
    assert all(float((job.work / f"failed_{attempt}").read_text()) <= failed[attempt] for attempt in (0, 1))
    submitted = job.happened[0]
    first, second = (event["time"] for event in job.happened if event["kind"] == "ranks")
    output, ended = (event["time"] for kind in ("output", "result") for event in job.happened if event["kind"] == kind)
    # A failure counts from the last event before it was known.
    outages = second - max(failed[0], output), ended - max(failed[1], second)
    assert lost["restart"] == pytest.approx(sum(outages), abs=1e-3)
    assert lost["queue"] + lost["launch"] == pytest.approx(first - submitted["time"] + submitted["seconds"], abs=1e-3)


def page_tells_all(job: Job) -> None:
    text = job.page.read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    for fact in ("FAILED", "attempt_1/stacks.txt", "prog.py", "1x2 (world size 2)", "restart 1 of 1", "Traceback"):
        assert fact in text, fact
    assert "2 of 2" in text and " ago" not in text
    # Two curves of two attempts, over steps and over time; each attempt has a newer checkpoint once.
    assert text.count("<polyline") == text.count('class="saved"') == 8
    assert len(re.findall(r"<svg role=.img.", text)) == 4  # phases, attempts, and a row for each rank
    if (path := browser.find()) is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium); the page was not opened in a browser")
    with browser.started(path) as opened:
        for width, dark in ((1200, False), (360, True)):
            opened.open(job.page, width, 900, dark)
            assert opened.requests == [job.page.resolve().as_uri()]
            assert not opened.complaints
            assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert opened.evaluate("document.title") == "r: FAILED"
            assert opened.evaluate("document.querySelectorAll('.picture rect').length") > 10
