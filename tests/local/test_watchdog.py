# SPDX-License-Identifier: BSD-3-Clause
"""Timers of ``torch.distributed.elastic.timer``: set by ranks, served by the host process."""

from __future__ import annotations

import json
import os
import stat
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local.hosts import NO_PRELOAD, Hosts

SET_UP = """
import os, sys, time
import torch.distributed.elastic.timer as timer
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
"""


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Callable[..., Hosts]:
    def start(body: str, *options: str, nproc: int = 1, environ: dict[str, str] | None = None, **more: Any) -> Hosts:
        path = tmp_path / "prog.py"
        path.write_text(SET_UP + textwrap.dedent(body))
        words = ["torchrun", "--nproc-per-node", str(nproc), "--role", "r", *options, str(path)]
        return Hosts(folder, words, environ={"TORCHELASTIC_ENABLE_FILE_TIMER": "1", **(environ or {})}, **more).start()

    return start


def test_a_rank_whose_timer_expires_is_killed_and_named(run: Callable[..., Hosts]) -> None:
    # The first attempt is started again, with the same server; ranks that keep their time are left alone.
    body = """
        with timer.expires(after=60):
            time.sleep(0.5)
        if rank == 1:
            with timer.expires(after=0.5, scope=f"step of {attempt}"):
                time.sleep(1000)
        time.sleep(1000)
    """
    hosts = run(body, "--max-restarts", "1", nproc=2)
    assert hosts.wait() == [137]
    lines = hosts.err().splitlines()
    assert "restart 1 of 1 after: rank 1 (" in hosts.err()
    assert "was killed by signal 9 (SIGKILL): its timer 'step of 0' expired" in hosts.err()
    assert "FAILED: rank 1 (" in lines[-1] and "(SIGKILL): its timer 'step of 1' expired" in lines[-1]
    assert sum("timer 'step of " in line and "expired: it gets signal 9" in line for line in lines) == 2
    error = json.loads((hosts.logs(0) / "error.json").read_text())["message"]["message"]
    assert "its timer 'step of 1' expired" in error


def test_a_pipe_that_cannot_be_made_is_named(run: Callable[..., Hosts], tmp_path: Path) -> None:
    path = tmp_path / "no" / "such"
    hosts = run("", environ={"TORCHELASTIC_TIMER_FILE": str(path)}, options=NO_PRELOAD)
    assert hosts.wait() == [1]
    assert f"the pipe of torch's timers: No such file or directory: {path}" in hosts.err().splitlines()[-1]


def test_the_pipe_is_the_jobs_own_and_takes_no_harm_from_what_a_rank_writes(
    run: Callable[..., Hosts], folder: Path
) -> None:
    body = """
        path = os.environ["TORCHELASTIC_TIMER_FILE"]
        with open(path, "w") as file:
            timer_of_init = {"pid": 1, "scope_id": "init", "expiration_time": 0, "signal": 9}
            for told in ({}, {"pid": -1}, {"expiration_time": "soon"}, {"pid": os.getpid(), "signal": 1 << 40}):
                print(json.dumps({**timer_of_init, **told}), file=file)
            print("no timer", file=file)
        with timer.expires(after=60):
            print(oct(os.stat(path).st_mode), path, flush=True)
    """
    hosts = run("import json\n" + textwrap.dedent(body))
    assert hosts.wait() == [0], hosts.err()
    mode, path = hosts.out().split()
    assert int(mode, 8) == stat.S_IFIFO | 0o600
    assert Path(path).is_relative_to(folder) and not os.path.exists(path)
    assert "expired" not in hosts.err()


def test_no_server_unless_asked_for(folder: Path, script: Callable[[str], str], tmp_path: Path) -> None:
    program = script("path = os.environ['TORCHELASTIC_TIMER_FILE']; print(path, os.path.exists(path))")
    environ = {"TORCHELASTIC_ENABLE_FILE_TIMER": "0", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "timers")}
    hosts = Hosts(folder, ["torchrun", program], options=NO_PRELOAD, environ=environ).start()
    assert hosts.wait() == [0], hosts.err()
    assert hosts.out() == f"{tmp_path / 'timers'} False\n"
