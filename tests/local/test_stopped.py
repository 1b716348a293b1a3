# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts and agents that are stopped (SIGSTOP): still there, and of no use."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchx.specs import AppState, Role

from tests.local.detached import Detached
from tests.local.hosts import Hosts

Eventually = Callable[..., object]

SLEEPER = "print('pid', os.getpid(), flush=True)\ntime.sleep(1000)\n"


def agent_of(host: int) -> int:
    """The process of a host's agent."""
    children = psutil.Process(host).children()
    return next(one.pid for one in children if any("bootstrap_main" in word for word in one.cmdline()))


@pytest.mark.parametrize(
    ("stopped", "reported_by"), [("host 0", 1), ("host 1", 0), ("agent 1", 0)], ids=["host0", "host1", "agent1"]
)
def test_the_process_that_does_not_answer_is_the_cause(
    folder: Path, script: Callable[[str], str], eventually: Eventually, stopped: str, reported_by: int
) -> None:
    options = ("--grace", "5", "--preload", "", "--lease", "6")
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--tee", "3", script(SLEEPER)]
    hosts = Hosts(folder, command, 2, options).start()
    eventually(lambda: len(hosts.rank_pids()) == 4, "the ranks", seconds=60)
    eventually(lambda: any(event["kind"] == "output" for event in hosts.events()), "the controller's report of it")
    kind, replica = stopped.split()
    host = hosts.processes[int(replica)].pid
    os.kill(host if kind == "host" else agent_of(host), signal.SIGSTOP)
    assert hosts.processes[reported_by].wait(60) == 1
    error = json.loads((hosts.logs(reported_by) / "error.json").read_text())["message"]
    whom = ("the agent of " if kind == "agent" else "") + f"host {replica} ("
    assert error["message"].startswith(whom), error
    assert f"pid {host}) does not answer: no message from it for 6 s (lease)" in error["message"]
    assert error["extraInfo"]["replica"] == int(replica)
    os.kill(host, signal.SIGCONT)
    assert hosts.wait(60) == [1, 1]
    if stopped == "host 0":  # it does not blame the host that has left it
        assert f"FAILED: host 0 ({os.uname().nodename}, pid {host}) did not run for " in hosts.err(0)


@pytest.fixture
def app(leaves_nothing: None) -> Detached:
    return Detached()


def run_host(app: Detached, path: str, **cfg: Any) -> tuple[str, int]:
    """Submit an app of one host; its id and the pid of the host."""
    role = Role("r", image="", entrypoint="python", args=[path])
    app_id = app.run(role, **{"grace": 30, "preload": "none", **cfg})
    events = [json.loads(line) for line in Path(app.paths(app_id).events).read_text().splitlines()]
    return app_id, next(event["pid"] for event in events if event["kind"] == "replica_started")


def test_the_only_host_of_a_job_is_ended_when_it_is_stopped_for_longer_than_the_lease(
    app: Detached, script: Callable[[str], str], eventually: Eventually
) -> None:
    app_id, host = run_host(app, script(SLEEPER), lease=1)
    eventually(lambda: any("pid" in line for line in app.log(app_id)), "the rank", seconds=60)
    os.kill(host, signal.SIGSTOP)
    status = app.wait(app_id, 60)
    assert status.state == AppState.FAILED
    assert f"its host (pid {host}) does not answer: stopped (SIGSTOP) for " in status.msg


def test_a_stopped_host_that_is_cancelled_ends_its_ranks_in_good_order(
    app: Detached, script: Callable[[str], str], eventually: Eventually, tmp_path: Path
) -> None:
    path = script(f"""
        def stop(*_):
            open("{tmp_path}/saved", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(1000)
    """)
    app_id, host = run_host(app, path)
    eventually(lambda: any("ready" in line for line in app.log(app_id)), "the rank", seconds=60)
    os.kill(host, signal.SIGSTOP)
    app.runner.cancel(app.handle(app_id))
    assert app.wait(app_id, 60).state == AppState.CANCELLED
    assert (tmp_path / "saved").exists()
