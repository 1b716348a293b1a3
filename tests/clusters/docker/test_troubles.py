# SPDX-License-Identifier: BSD-3-Clause
"""What befalls containers, images and the daemon, and what a person is told of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from torchx.specs import AppState, RetryPolicy

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon, mount_words
from tests.contract.place import TORCHX
from tests.waits import WITHIN, until

pytestmark = [pytest.mark.slow]

SLEEPS = """
    import os, time
    print("rank", os.environ["RANK"], flush=True)
    time.sleep(1000)
"""


def test_a_container_that_is_removed_fails_its_job(apps: Apps, daemon: Daemon) -> None:
    """Nothing starts it again, and the other hosts would wait for it for minutes."""
    role = apps.torchrun(apps.program(SLEEPS), nproc=1, max_retries=3, retry_policy=RetryPolicy.APPLICATION)
    handle = apps.run(role, apps.role("sleep", "1000", name="other"))
    until(lambda: apps.log(handle).count("]:rank") == 2, "the ranks")
    with contextlib.closing(daemon.client()) as client:
        client.containers.get(apps.hostname(handle, 0)).remove(force=True)
    status = apps.wait(handle)
    said = "the container of replica trainer/0 was removed (docker rm), and its log with it"
    assert (status.state, status.msg) == (AppState.FAILED, said)
    assert apps.states(handle)["trainer/0"] is AppState.UNKNOWN
    assert set(apps.states(handle)) == {"trainer/0", "trainer/1", "other/0"}
    with pytest.raises(ValueError, match="trainer/. was removed"):
        apps.lines(handle, 0)


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("/usr/bin:/bin", 127, "exec python failed"),
        ("/opt", 1, "No module named '?torchx_monarch"),
    ],
)
def test_an_image_without_what_is_needed(apps: Apps, daemon: Daemon, path: str, code: int, words: str) -> None:
    role = apps.torchrun("train.py", nproc=1, replicas=1, max_retries=1, env={"PYTHONPATH": ""})
    role.image = daemon.import_image(f"without{path.count(':')}", path)
    handle = apps.run(role)
    status = apps.wait(handle)
    assert (status.state, status.num_restarts) == (AppState.FAILED, 1)
    assert status.msg.startswith(f"replica trainer/0 exited with code {code}; its last output: "), status.msg
    assert re.search(words, status.msg), status.msg


def test_a_daemon_that_goes_away(leaves_nothing: None, tmp_path: Path) -> None:
    daemon = Daemon()
    env = {**os.environ, "TORCHX_PLUGINS_SOURCE": "1", "DOCKER_HOST": daemon.host, "PYTHONUNBUFFERED": "1"}
    mounts = mount_words(daemon.mounts())
    role = ["utils.sh", "--image", daemon.image, "--cpu", "1", "--memMB", "256", "--mounts", mounts]
    words = ["run", "-s", NAME, "--workspace", "", "--wait", *role, "sh", "-c", "echo up; sleep 1000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path, "env": env}
    try:
        waits = subprocess.Popen([*TORCHX, *words], **pipes)  # type: ignore[call-overload]
        handle = next(line for line in waits.stdout if line.startswith(NAME)).strip()
        follows = subprocess.Popen([*TORCHX, "log", "--tail", handle], **pipes)  # type: ignore[call-overload]
        assert "up" in next(line for line in follows.stdout if "INFO" not in line)
    finally:
        daemon.stop()
    said = f"the Docker daemon at {daemon.host} does not answer any more"
    for process in (waits, follows):
        lines = process.stdout.read().splitlines()
        assert process.wait(WITHIN) == 1
        assert said in lines[-1] and lines[-1].endswith("What runs there may go on: ask again when it is back")
        process.stdout.close()
        if process is waits:  # what follows does so in threads, of which TorchX shows the traceback
            assert not any("Traceback" in line for line in lines), lines
