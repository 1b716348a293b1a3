# SPDX-License-Identifier: BSD-3-Clause
"""monarch_docker with a real Docker daemon."""

from __future__ import annotations

import json
import re
import time

import pytest
from torchx.specs import AppState, BindMount, Resource

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon
from tests.waits import until

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
    main = apps.torchrun(path, name="main", nproc=1)
    other = apps.torchrun(path, "waits", name="other_one", nproc=1)
    reader = apps.role("sh", "-c", "echo up; sleep 1000", name="reader", metadata={"monarch": {"sidecar": True}})
    handle = apps.run(main, other, reader)
    over = {"main/0": AppState.SUCCEEDED, "main/1": AppState.SUCCEEDED}
    until(lambda: over.items() <= apps.states(handle).items(), "the end of the first role")
    assert apps.status(handle).state is AppState.RUNNING
    go.touch()
    assert apps.wait(handle).state is AppState.SUCCEEDED
    assert f"rank 1 of 2 at {apps.hostname(handle, 0, role=1)}" in apps.log(handle, "other_one")
    assert f"rank 1 of 2 at {apps.hostname(handle, 0)}" in apps.log(handle, "main")
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
    """dockerd starts a failed container again whatever its code: the host in it must not run anything then."""
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
    # The host of the next start has ended with code 0, or dockerd has tried as often as it was told to.
    time.sleep(1)
    assert apps.status(handle) == status
    assert json.loads(apps.torchx("status", "--json", handle))["num_restarts"] == starts - 1
