# SPDX-License-Identifier: BSD-3-Clause
"""The screen of ``torchx monarch top``: what it shows in terminals of several sizes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from dataclasses import replace
from typing import Any

import pytest

from tests import waits
from tests.waits import WITHIN
from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.cli import top
from torchx_monarch.cli.jobs import JobFacts
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.schedulers.job_status import Failure, JobStatus

APP = AppSnapshot("a-1", "a", [])
JOB = JobStatus("monarch_local://torchx/a-1", "a", "RUNNING", phase="running", elapsed=61, attempt=2, attempts=3)


def view(ranks: int, **more: Any) -> JobFacts:
    rows = [RankView(rank, 0, f"node{rank // 8}", 100 + rank, "running", last_line="x" * 300) for rank in range(ranks)]
    return JobFacts(APP, replace(JOB, activity=rows), **more)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (40, 6), (300, 100)])
@pytest.mark.parametrize("ranks", [0, 4, 256])
@pytest.mark.parametrize("by_host", [False, True])
def test_a_screen_has_the_size_of_its_terminal(width: int, height: int, ranks: int, by_host: bool) -> None:
    missing = {str(replica): "it does not answer, " * 30 for replica in range(40)}
    for facts in (view(ranks), view(ranks, missing=missing, problem="a problem " * 30)):
        for first in (0, 10, 10_000):
            lines, _ = top.screen(facts, width, height, first, by_host)
            assert len(lines) == height and max(map(len, lines)) <= width
            assert lines[0].startswith(JOB.handle[:20]) and lines[-1].startswith("q quit")


def test_the_table_scrolls_to_its_end_and_not_beyond() -> None:
    lines, first = top.screen(view(256), 80, 24, 10_000)
    assert first == 256 - 19 and "355" in lines[-2] and lines[-1].endswith("238-256 of 256")
    lines, first = top.screen(view(256), 80, 24, 1)
    assert first == 1 and lines[4].split()[:3] == ["1", "node0", "101"]
    lines, first = top.screen(view(256), 80, 60, 10_000, by_host=True)
    assert first == 0 and lines[4].split()[0] == "0-7" and "of 32" not in lines[-1]


def test_the_head_says_what_is_wrong() -> None:
    hang = Failure(0.0, "rank 1 makes rank 0 wait")
    status = replace(JOB, hang=hang, last_failure=Failure(0.0, "rank 1 \x1b exited"), restarts=1, hosts=1, ranks=2)
    failed = JobFacts(APP, status, missing={"1": "no answer"}, problem="cannot be reached")
    assert top.head(failed, 80) == [
        "monarch_local://torchx/a-1: RUNNING for 1 min 1 s",
        "ranks run; attempt 2 of 3; 2 ranks on 1 host; hang: rank 1 makes rank 0 wait;",
        r"last failure: rank 1 \x1b exited; 1 restart",
        "host 1: no answer",
        "cannot be reached",
    ]
    assert json.loads(json.dumps(top.to_json(failed)))["missing"] == {"1": "no answer"}


PROGRAM = """
from torchx_monarch.cli.top import draw, pressed, whole_screen
with whole_screen() as terminal:
    keys = []
    while keys[-1:] != ["q"]:
        draw(terminal, [f"pressed {' '.join(keys)}."])
        keys += filter(None, [pressed(terminal)])
"""


def _as_by_a_shell() -> None:
    os.setpgrp()  # Ctrl-Z does not stop a group of processes that no shell, or other parent, could continue
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # a background job may have it ignored


@pytest.mark.parametrize(
    ("end", "term"),
    [*((end, "xterm-256color") for end in ("q", "ctrl-c", "ctrl-z", "sigterm", "sighup")), ("q", "of-another-world")],
)
def test_the_terminal_is_as_it_was_before(end: str, term: str) -> None:
    near, far = pty.openpty()
    before = termios.tcgetattr(far)
    words = [sys.executable, "-c", PROGRAM]
    environ = {**os.environ, "TERM": term}
    child = subprocess.Popen(
        words, stdin=far, stdout=far, stderr=subprocess.PIPE, preexec_fn=_as_by_a_shell, env=environ
    )
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(near, 4096)

    def stopped() -> bool:
        child.send_signal(signal.SIGTSTP)  # curses ignores it while it draws
        return os.waitpid(child.pid, os.WUNTRACED | os.WNOHANG)[0] == child.pid

    try:
        until(b"pressed .")
        assert b"\x1b[?1049h" in shown and not termios.tcgetattr(far)[3] & termios.ICANON
        os.write(near, b"h\x1bOA\x1b[6~")
        until(b"KEY_NPAGE.")
        if end == "ctrl-z":
            # Seldom: a second signal within the handler of the first would stop it twice.
            waits.until(stopped, "the stop", every=1.0)
            assert termios.tcgetattr(far) == before
            until(b"\x1b[?1049l")
            shown = b""
            child.send_signal(signal.SIGCONT)
            until(b"pressed h KEY_UP KEY_NPAGE.")
            assert b"\x1b[?1049h" in shown and not termios.tcgetattr(far)[3] & termios.ICANON
        if end in ("q", "ctrl-z"):
            os.write(near, b"q")
        else:
            child.send_signal({"ctrl-c": signal.SIGINT, "sigterm": signal.SIGTERM, "sighup": signal.SIGHUP}[end])
        until(b"\x1b[?1049l")
        child.wait(20)
        assert termios.tcgetattr(far) == before
    finally:
        child.kill()
        child.communicate(timeout=WITHIN)
        os.close(near)
        os.close(far)


def test_a_terminal_that_is_closed_is_not_waited_for() -> None:
    near, far = pty.openpty()
    environ = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=far, stdout=far, env=environ) as child:
        try:
            os.close(far)
            shown = b""
            while b"pressed ." not in shown:
                shown += os.read(near, 4096)
            os.close(near)
            child.wait(WITHIN)
        finally:
            child.kill()
