# SPDX-License-Identifier: BSD-3-Clause
"""A rank fails while others wait for it, or all fail at their start: what the log and ``torchx status`` say of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.fork_server import run_torchx

PROGRAM = """
import os, signal
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
def step():
    if rank == 2:
        {end}
    dist.all_reduce(torch.ones(1))
step()
"""

ENDS = {
    "ValueError": ("raise ValueError('the loss is NaN')", 1, "ValueError: the loss is NaN"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by signal 9 (SIGKILL)"),
}


@pytest.mark.parametrize(
    "end", ["ValueError", pytest.param("SIGKILL", marks=pytest.mark.nightly("3 s of processor time for four ranks"))]
)
def test_rank_that_began_it(end: str, tmp_path: Path) -> None:
    body, code, words = ENDS[end]
    (tmp_path / "prog.py").write_text(PROGRAM.format(end=body))
    done = run_torchx("run", "-s", "monarch_local", "--wait", "monarch.spmd", "-j", "1x4", "prog.py", cwd=tmp_path)
    assert done.returncode == 1
    handle = done.stdout.strip()

    log = run_torchx("log", handle, cwd=tmp_path).stdout
    report = "\n".join(line for line in log.splitlines() if not re.search(r"^\S+ \[\d\] ", line))
    assert re.search(rf"FAILED: rank 2 \(local rank \d on .*, pid \d+\) .*{re.escape(words)}", report), log
    assert report.count("FAILED: ") == 1
    # Its traceback and no other; what the others say of their broken connections is no cause.
    assert (
        report.count("Traceback (most recent call last):")
        == report.count("traceback of rank 2:")
        == (end == "ValueError")
    )
    assert ("in step" in report) == (end == "ValueError")
    assert "[monarch] also: " not in report

    status = json.loads(run_torchx("status", "--json", handle, cwd=tmp_path).stdout)
    assert status["state"] == "FAILED"
    error = json.loads(status["structured_error_msg"])["message"]
    assert error["message"].startswith("rank 2 (") and error["errorCode"] == code
    shown = run_torchx("status", handle, cwd=tmp_path).stdout
    for text in (status["msg"], shown):
        assert re.search(r"rank 2 \(", text) and words in text, text
    for other in (0, 1, 3):
        assert f"rank {other} (" not in json.dumps(status) + shown


STARTS = {
    "module": (["-m", "nope.mod", "--lr", "0.1"], "", "No module named 'nope'"),
    "option": (
        ["prog.py", "--lrr", "1"],
        "import argparse; argparse.ArgumentParser().parse_args()\n",
        "exited with code 2; last output: prog.py: error: unrecognized arguments: --lrr 1",
    ),
}


@pytest.mark.parametrize(("start", "shape"), [("module", "1x4"), ("option", "2x2")])
def test_a_start_that_fails_on_all_ranks(start: str, shape: str, tmp_path: Path) -> None:
    program, text, words = STARTS[start]
    (tmp_path / "prog.py").write_text(text)
    preload = "json" if start == "module" else "none"  # none of the programs needs torch
    words_of_run = ("--wait", "-cfg", f"preload={preload}", "monarch.spmd", "-j", shape, *program)
    done = run_torchx("run", "-s", "monarch_local", *words_of_run, cwd=tmp_path)
    assert done.returncode == 1
    handle = done.stdout.strip()

    log = run_torchx("log", handle, cwd=tmp_path).stdout
    report = [line for line in log.splitlines() if "[monarch] " in line]
    # A rank that is slow to start may be stopped before it fails; those that failed are one cause all the same.
    ranks = r"(all 4 ranks:|ranks .* of 4:|rank \d \(.*\)( exited with code 1:)?)"
    (verdict,) = [line for line in report if "FAILED: " in line]
    assert re.search(rf"FAILED: {ranks} {re.escape(words)}", verdict), log
    assert len([line for line in report if re.search(rf"\[monarch\] {ranks} {re.escape(words)}", line)]) == 1, log
    assert not [line for line in report if "also: " in line or "torchx_monarch" in line or "runpy" in line], log

    status = json.loads(run_torchx("status", "--json", handle, cwd=tmp_path).stdout)
    error = json.loads(status["structured_error_msg"])["message"]
    assert re.match(rf"{ranks} {re.escape(words)}", error["message"])
    assert error["errorCode"] == (2 if start == "option" else 1)
    assert words in status["msg"] and "torchx_monarch" not in json.dumps(error)
    path = Path(os.environ["MONARCH_STATE_DIR"], "apps", handle.rpartition("/")[2], "events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (failure,) = [event for event in events if event["kind"] == "failure"]
    assert failure["rank"] in range(4)
