# SPDX-License-Identifier: BSD-3-Clause
"""Apps on moto's AWS Batch whose jobs really run, as containers of a Docker daemon of our own."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from torchx.specs import AppState

from tests.clusters.aws_batch.apps import Apps
from tests.clusters.docker.daemon import Daemon
from tests.waits import until


@pytest.mark.scenario("root cause in status", wire="moto+docker")
@pytest.mark.scenario("status and log long after, elsewhere", wire="moto+docker")
def test_a_failing_rank_is_the_cause(running_apps: Apps) -> None:
    apps = running_apps
    path = apps.program("""
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        time.sleep(1000)
    """)
    handle = apps.run(apps.torchrun("--max-restarts", "1", path, nproc=1))
    status = apps.wait(handle)
    assert (status.state, status.num_restarts) == (AppState.FAILED, 1)
    error = json.loads(status.structured_error_msg)["message"]
    assert error["message"].startswith("rank 1 (local rank 0 on "), apps.log(handle, replicas=2)
    assert "ValueError: boom" in error["message"]
    assert status.msg == "replica trainer/1 exited with code 1"
    assert json.loads(apps.torchx("status", "--json", handle))["state"] == "FAILED"
    log = apps.torchx("log", f"{handle}/trainer")
    assert "trainer/0 [monarch] FAILED: rank 1" in log


def test_a_lost_node_ends_the_job_and_is_named(running_apps: Apps, daemon: Daemon) -> None:
    """Batch replaces no node; with max_retries it would start all of them again, which moto does not do."""
    apps = running_apps
    handle = apps.run(
        apps.torchrun(
            apps.program(f"open({str(apps.folder / 'up')!r}, 'a').write('x'); import time; time.sleep(1000)"),
            nproc=1,
        )
    )
    until(lambda: len(read(apps.folder / "up")) == 2, "both ranks")
    with contextlib.closing(daemon.client()) as client:
        (lost,) = [container.name for container in client.containers.list() if container.name.endswith("-1")]
    daemon.kill(lost)
    status = apps.wait(handle)
    assert status.state is AppState.FAILED
    assert "host 1" in json.loads(status.structured_error_msg)["message"]["message"], apps.log(handle)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.scenario("cancel while running", wire="moto+docker")
@pytest.mark.scenario("log follow, since, until", wire="moto+docker")
def test_cancel_while_running(running_apps: Apps, daemon: Daemon) -> None:
    apps = running_apps
    handle = apps.run(apps.role("sh", "-c", "echo up; sleep 1000"))
    until(lambda: apps.status(handle).state is AppState.RUNNING, "the container")
    # A job runs before its shell has printed, or its container exists. moto has the log only after its end.
    with contextlib.closing(daemon.client()) as client:
        until(lambda: any(b"up\n" in container.logs() for container in client.containers.list()), "the shell")
    apps.torchx("cancel", handle)
    status = apps.wait(handle)
    assert (status.state, status.msg) == (AppState.CANCELLED, "cancelled through torchx")
    assert apps.states(handle) == {"trainer/0": AppState.CANCELLED}
    assert json.loads(apps.torchx("status", "--json", handle))["state"] == "CANCELLED"
    assert list(apps.runner.log_lines(handle, "trainer", 0, should_tail=True)) == ["up\n"]
    assert list(apps.runner.log_lines(handle, "trainer", 0, regex="down")) == []
