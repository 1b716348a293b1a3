# SPDX-License-Identifier: BSD-3-Clause
"""monarch_docker with a real Docker daemon, and what befalls containers, images and the daemon."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from torchx.specs import AppState, BindMount, Resource, RetryPolicy

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon, mount_words
from tests.contract.place import TORCHX
from tests.waits import WITHIN, until

pytestmark = [pytest.mark.slow]

SAYS = """
    import os, socket, sys
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"], flush=True)
    print("to stderr", file=sys.stderr, flush=True)
"""

SLEEPS_AT_FIRST = """
    import os, time
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", attempt, "rank", os.environ["RANK"], flush=True)
    if not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        time.sleep(1000)
"""


def test_names_may_be_anything(apps: Apps) -> None:
    """Also where dockerd, a handle and the DNS allow less."""
    name = 'tr ai/ner\'s.."x"'
    handle = apps.run(apps.torchrun(apps.program(SLEEPS_AT_FIRST), name=name, nproc=1), name=" my/../app's \u00fc")
    until(lambda: apps.log(handle, name).count("attempt 0") == 2, "the ranks")
    apps.torchx("cancel", handle)
    assert apps.status(handle).state is AppState.CANCELLED
    assert [app.name for app in apps.runner.list(NAME)] == [" my/../app's \u00fc"]


def test_want_of_memory_is_told(apps: Apps) -> None:
    code = "b = bytearray(1 << 28); b[::4096] = b[::4096].replace(bytes(1), bytes([1]))"
    handle = apps.run(apps.role("python", "-c", code, resource=Resource(cpu=1, gpu=0, memMB=64)), preload="none")
    status = apps.wait(handle)
    assert status.state is AppState.FAILED
    assert "for want of memory, of which it had 64 MB (memMB)" in status.msg, status


def test_a_workspace_is_in_the_image(apps: Apps) -> None:
    (apps.folder / "src").mkdir()
    (apps.folder / "src" / "hello.txt").write_text("from the workspace\n")
    handle = apps.run(apps.role("cat", "hello.txt"), workspace=str(apps.folder / "src"))
    assert apps.wait(handle).state is AppState.SUCCEEDED
    assert apps.lines(handle) == ["from the workspace\n"]


def test_roles_are_worlds_and_all_but_sidecars_are_awaited(apps: Apps) -> None:
    go = apps.folder / "go"
    path = apps.program(
        SAYS
        + f"""
    import time
    while sys.argv[1:] == ["waits"] and not os.path.exists({str(go)!r}):
        time.sleep(0.1)
    """
    )
    main = apps.torchrun(path, name="main", replicas=1)
    other = apps.torchrun(path, "waits", name="other_one", replicas=1)
    reader = apps.role("sh", "-c", "echo up; sleep 1000", name="reader", metadata={"monarch": {"sidecar": True}})
    handle = apps.run(main, other, reader)
    until(lambda: apps.states(handle)["main/0"] is AppState.SUCCEEDED, "the end of the first role")
    assert apps.status(handle).state is AppState.RUNNING
    go.touch()
    assert apps.wait(handle).state is AppState.SUCCEEDED
    assert f"rank 1 of 2 at {apps.hostname(handle, 0, role=1)}" in apps.log(handle, "other_one", replicas=1)
    assert f"rank 1 of 2 at {apps.hostname(handle, 0)}" in apps.log(handle, "main", replicas=1)
    assert apps.states(handle)["reader/0"] is AppState.CANCELLED


def test_what_cannot_start_leaves_nothing(apps: Apps, daemon: Daemon) -> None:
    good, bad = apps.role("true", name="good"), apps.role("true", name="bad")
    bad.image = "sha256:" + "0" * 64
    with pytest.raises(Exception, match="was not started: No such image"):
        apps.run(good, bad)
    assert daemon.left() == []


@pytest.mark.parametrize(
    ("replicas", "code", "retry_on", "starts", "why"),
    [
        (2, 78, "", 1, "exit code 78 (EX_CONFIG) asks for no restart"),
        (1, 3, "3", 3, ""),
    ],
)
def test_an_exit_code_may_ask_for_no_other_start(
    apps: Apps, replicas: int, code: int, retry_on: str, starts: int, why: str
) -> None:
    """dockerd starts a failed container again whatever its code: the host in it must end with 0."""
    path = apps.program(f"""
        import os, sys, time
        if os.environ["RANK"] != "{replicas - 1}":
            time.sleep(1000)
        with open(os.path.join(os.path.dirname(__file__), "starts"), "a") as file:
            file.write("x")
        sys.exit({code})
    """)
    role = apps.torchrun(path, nproc=1, replicas=replicas, max_retries=2)
    if retry_on:  # a /tmp that others share is no place for notes
        role.mounts.append(BindMount(str(apps.folder), "/tmp"))
    handle = apps.run(role, retry_on=retry_on)
    status = apps.wait(handle)
    assert (status.state, status.num_restarts) == (AppState.FAILED, starts - 1), apps.log(handle, replicas=replicas)
    assert re.fullmatch(rf"replica trainer/. exited with code {code}", status.msg.partition("; not started again: ")[0])
    assert status.msg.partition("; not started again: ")[2] == why
    error = json.loads(status.structured_error_msg)["message"]
    assert error["errorCode"] == code and error["message"].startswith(f"rank {replicas - 1} (local rank 0 on ")
    assert (apps.folder / "starts").read_text() == "x" * starts
    assert not list(apps.folder.glob("*starts.json"))
    assert json.loads(apps.torchx("status", "--json", handle))["num_restarts"] == starts - 1
    with contextlib.closing(apps.daemon.client()) as client:
        containers = [client.containers.get(apps.hostname(handle, replica)) for replica in range(replicas)]
        assert {container.attrs["RestartCount"] for container in containers} == {starts - 1}


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
