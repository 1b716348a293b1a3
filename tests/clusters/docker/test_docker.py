# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""monarch_docker with a real Docker daemon."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest
from torchx.schedulers.api import Stream
from torchx.specs import AppState, BindMount, InvalidRunConfigException, Resource, RetryPolicy

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import ROOT, Daemon
from tests.contract.place import TORCHX
from torchx_monarch.backends.core import client_credentials
from torchx_monarch.transport.credentials import ClientCredentials

Eventually = Callable[..., object]

pytestmark = [pytest.mark.slow]

SAYS = """
    import os, socket, sys
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"], flush=True)
    print("to stderr", file=sys.stderr, flush=True)
"""

SAVES = """
    import os, signal, sys, time
    def stop(number, frame):
        time.sleep(1)
        os.write(1, f"saved {os.environ['RANK']}\\n".encode())  # print is not reentrant
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
"""

SLEEPS_AT_FIRST = """
    import os, time
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", attempt, "rank", os.environ["RANK"], flush=True)
    if not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        time.sleep(1000)
"""


@pytest.mark.scenario("status and log long after, elsewhere")
@pytest.mark.scenario("describe gives the original app")
@pytest.mark.scenario("list once each")
@pytest.mark.scenario("delete leaves nothing")
@pytest.mark.scenario("environment arrives whole")
@pytest.mark.scenario("log follow, since, until")
def test_succeeds_and_is_known_from_anywhere(apps: Apps, daemon: Daemon) -> None:
    before = datetime.now(timezone.utc)
    role = apps.torchrun(apps.program(SAYS), resource=Resource(cpu=1, gpu=0, memMB=512), env={"WORD": "a,b\n'c'"})
    handle = apps.run(role)
    status = apps.wait(handle)
    log = apps.log(handle)
    assert status.state is AppState.SUCCEEDED, log
    first = apps.hostname(handle, 0)
    for rank in range(4):
        assert f"rank {rank} of 4 at {first}\n" in log
    assert "INSECURE" not in log
    assert apps.states(handle) == {"trainer/0": AppState.SUCCEEDED, "trainer/1": AppState.SUCCEEDED}

    # The streams, the times, the expression.
    assert any("to stderr" in line for line in apps.lines(handle))
    assert not any("to stderr" in line for line in apps.lines(handle, streams=Stream.STDOUT))
    assert not any("rank 0 of" in line for line in apps.lines(handle, streams=Stream.STDERR))
    assert [line.partition("rank")[2] for line in apps.lines(handle, 1, regex="rank 2 of")] == [f" 2 of 4 at {first}\n"]
    assert apps.lines(handle, since=before) == apps.lines(handle, until=datetime.now()) == apps.lines(handle)
    assert apps.lines(handle, since=datetime.now()) == apps.lines(handle, until=before) == []

    # A process elsewhere.
    told = json.loads(apps.torchx("status", "--json", handle))
    assert (told["state"], told["num_restarts"]) == ("SUCCEEDED", 0)
    assert "rank 3 of 4" in apps.torchx("log", f"{handle}/trainer/1")
    listed = [line for line in apps.torchx("list", "-s", NAME).splitlines() if handle in line]
    assert len(listed) == 1 and "SUCCEEDED" in listed[0]
    assert "'metadata': {'team': 'a b'}" in apps.torchx("describe", handle)
    described = apps.described(handle)
    assert described is not None
    (theirs,) = described.roles
    assert (theirs.entrypoint, theirs.args, theirs.mounts) == (role.entrypoint, role.args, role.mounts)
    assert theirs.env["WORD"] == "a,b\n'c'"
    assert "MONARCH_CREDENTIALS" not in theirs.env
    client = Path(client_credentials.path(NAME, handle.rpartition("/")[2]))
    assert ClientCredentials.from_text(json.loads(client.read_text())["credentials"])
    apps.torchx("delete", handle)
    assert daemon.left() == []
    assert apps.runner.status(handle) is None
    assert not client.exists()


@pytest.mark.scenario("two hosts, digits")
def test_trains_on_real_digits(apps: Apps) -> None:
    """By the command that a person types."""
    train = ["--epochs", "4", "--min-accuracy", "0.8", "--checkpoint-dir", str(apps.folder / "checkpoints")]
    # Enough for a torch that is built for GPUs.
    component = [
        "monarch.spmd",
        "-j",
        "2x2",
        "--memMB",
        "6000",
        "--image",
        apps.daemon.image,
        "--mounts",
        apps.daemon.mount_words(apps.folder),
    ]
    words = ["run", "-s", NAME, "--workspace", "", *component, str(ROOT / "examples" / "digits.py"), *train]
    handle = apps.adopt(apps.torchx(*words).split()[-1])
    status = apps.wait(handle, seconds=200)
    (role,) = apps.described(handle).roles
    log = apps.log(handle, role.name)
    assert status.state is AppState.SUCCEEDED, log
    assert "4 ranks on" in log


@pytest.mark.scenario("lost host replaced")
@pytest.mark.parametrize("lost", [1, 0])
def test_the_job_goes_on_when_a_container_is_killed(
    apps: Apps, daemon: Daemon, eventually: Eventually, lost: int
) -> None:
    handle = apps.run(
        apps.torchrun(apps.program(SLEEPS_AT_FIRST), max_retries=1, retry_policy=RetryPolicy.REPLICA),
        rejoin_timeout=30,
    )
    eventually(lambda: apps.log(handle).count("attempt 0") == 4, "the first attempt")
    (apps.folder / "go").touch()
    daemon.kill(apps.hostname(handle, lost))
    status = apps.wait(handle)
    assert status.state is AppState.SUCCEEDED, apps.log(handle)
    assert status.num_restarts == 1
    assert apps.log(handle).count("attempt 1") == 4, apps.log(handle)


@pytest.mark.scenario("retries")
@pytest.mark.parametrize("lost", [1, 0])
def test_the_job_begins_again_when_a_container_is_killed(
    apps: Apps, daemon: Daemon, eventually: Eventually, lost: int
) -> None:
    """dockerd starts the killed one again long before the others have ended: it must wait for them."""
    path = apps.program(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + textwrap.dedent(SLEEPS_AT_FIRST)
    )
    handle = apps.run(apps.torchrun(path, max_retries=1), grace=3)
    eventually(lambda: apps.log(handle).count("attempt 0") == 4, "the first attempt")
    (apps.folder / "go").touch()
    daemon.kill(apps.hostname(handle, lost))
    status = apps.wait(handle)
    assert status.state is AppState.SUCCEEDED, apps.log(handle)
    assert status.num_restarts == 1
    assert apps.log(handle).count("attempt 0") == 8, apps.log(handle)
    folder = f"/tmp/torchx-monarch/{apps.hostname(handle, 0)}"
    assert {"attempt_0", "attempt_1"} <= apps.files(handle, 0, folder)


FAILS_BESIDE = """
    import os, pathlib, sys, time
    folder, often = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    me = os.environ["ROLE"] + os.environ["RANK"]
    start = len(list(folder.glob(f"{me}-*")))
    (folder / f"{me}-{start}").touch()
    while len(list(folder.glob(f"*-{start}"))) < 4:
        time.sleep(0.05)
    if start < often:
        if me == "reader1":
            raise ValueError("boom")
        time.sleep(1000)
"""


@pytest.mark.parametrize(("often", "state"), [(1, AppState.SUCCEEDED), (2, AppState.FAILED)])
def test_all_roles_begin_again_when_one_has_failed(apps: Apps, often: int, state: AppState) -> None:
    path, folder = apps.program(FAILS_BESIDE), apps.folder / "starts"
    folder.mkdir()
    words, names = (path, str(folder), str(often)), ("trainer", "reader")
    handle = apps.run(*(apps.torchrun(*words, name=name, nproc=1, max_retries=1, env={"ROLE": name}) for name in names))
    status = apps.wait(handle, seconds=90)
    logs = apps.log(handle) + apps.log(handle, "reader")
    assert (status.state, status.num_restarts) == (state, 1), logs
    assert len(list(folder.iterdir())) == 8, logs
    assert logs.count("FAILED: reader/1 failed: rank 1 (local rank 0 on ") == often, logs
    if often == 2:  # though the trainers' containers may be the first to have ended
        assert status.msg.startswith("replica reader/"), status
        assert json.loads(status.structured_error_msg)["message"]["message"].startswith("rank 1 (local rank 0 on ")


@pytest.mark.scenario("preemption")
def test_a_container_that_is_told_to_end_is_preempted(apps: Apps, daemon: Daemon, eventually: Eventually) -> None:
    """As when its machine is shut down, not by us: all ranks have the grace, and the job begins again."""
    path = apps.program(textwrap.dedent(SAVES) + textwrap.dedent(SLEEPS_AT_FIRST))
    handle = apps.run(apps.torchrun(path, max_retries=1))
    eventually(lambda: apps.log(handle).count("attempt 0") == 4, "the first attempt")
    (apps.folder / "go").touch()
    daemon.kill(apps.hostname(handle, 1), "TERM")
    status = apps.wait(handle)
    log = apps.log(handle)
    assert status.state is AppState.SUCCEEDED, log
    assert status.num_restarts == 1
    assert (log.count("saved"), log.count("attempt 0")) == (4, 8), log
    assert "preempted or cancelled" in log


@pytest.mark.scenario("cancel while running")
def test_cancel_is_quick_and_stays_known(apps: Apps, eventually: Eventually) -> None:
    # As process 1 these shells would ignore SIGTERM and be killed after the grace.
    role = apps.torchrun(apps.program(SLEEPS_AT_FIRST))
    handle = apps.run(role, apps.role("sh", "-c", "echo up; sleep 1000", name="reader", replicas=3))
    eventually(lambda: apps.log(handle).count("attempt 0") == 4, "the ranks")
    assert apps.status(handle).state is AppState.RUNNING
    followed = iter(apps.runner.log_lines(handle, "trainer", 0, should_tail=True))
    next(followed)
    apps.torchx("cancel", handle)
    assert apps.status(handle).state is AppState.CANCELLED
    assert set(apps.states(handle).values()) == {AppState.CANCELLED}
    assert json.loads(apps.torchx("status", "--json", handle))["state"] == "CANCELLED"
    assert any("STOPPED" in line for line in followed)  # and it ends
    apps.runner.cancel(handle)
    assert apps.status(handle).state is AppState.CANCELLED


@pytest.mark.scenario("cancel while pending")
def test_cancel_while_a_container_waits_for_its_next_start(apps: Apps, eventually: Eventually) -> None:
    handle = apps.run(apps.role("sh", "-c", "exit 3", max_retries=50))
    eventually(lambda: apps.status(handle).state is AppState.PENDING, "the wait between two starts")
    apps.runner.cancel(handle)
    assert apps.status(handle).state is AppState.CANCELLED
    time.sleep(1)
    assert apps.status(handle).state is AppState.CANCELLED


def test_names_may_be_anything(apps: Apps, eventually: Eventually) -> None:
    """Also where dockerd, a handle and the DNS allow less."""
    name = 'tr ai/ner\'s.."x"'
    handle = apps.run(apps.torchrun(apps.program(SLEEPS_AT_FIRST), name=name, nproc=1), name=" my/../app's \u00fc")
    eventually(lambda: apps.log(handle, name).count("attempt 0") == 2, "the ranks")
    apps.torchx("cancel", handle)
    assert apps.status(handle).state is AppState.CANCELLED
    assert [each.name for each in apps.runner.list(NAME)] == [" my/../app's \u00fc"]


@pytest.mark.scenario("log follow, since, until")
@pytest.mark.scenario("retries")
def test_follows_a_log_through_restarts_to_the_end(apps: Apps) -> None:
    handle = apps.run(apps.role("sh", "-c", "echo start; sleep 0.5; exit 3", max_retries=2))
    assert apps.lines(handle, should_tail=True) == ["start\n"] * 3
    status = apps.wait(handle)
    assert (status.state, status.num_restarts) == (AppState.FAILED, 2)
    assert status.msg == "replica trainer/0 exited with code 3"


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


@pytest.mark.scenario("credentials not on show")
def test_credentials_are_in_the_containers_environment_alone(apps: Apps, daemon: Daemon) -> None:
    path = apps.program("""
        import glob, os
        print("secret", os.environ.get("MONARCH_CREDENTIALS"), flush=True)
        for name in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                print(open(name).read().replace(chr(0), " "), flush=True)
            except OSError:  # that process is gone
                pass
    """)
    handle = apps.run(apps.torchrun(path))
    assert apps.wait(handle).state is AppState.SUCCEEDED, apps.log(handle)
    with contextlib.closing(daemon.client()) as client:
        about = client.containers.get(apps.hostname(handle, 0)).attrs
    given = dict(word.split("=", 1) for word in about["Config"]["Env"])
    secret = given["MONARCH_CREDENTIALS"]
    log = apps.log(handle)
    assert len(secret) > 500 and "torchx_monarch.host" in log
    assert log.count("secret None") == 4
    del about["Config"]["Env"]
    for shown in (json.dumps(about), log, apps.torchx("describe", handle), apps.torchx("status", handle)):
        assert secret not in shown


@pytest.mark.scenario("bad options named")
def test_bad_options_are_named(apps: Apps) -> None:
    for cfg, words in (({"innit": False}, "(?s)innit.*init"), ({"grace": -1}, "`grace` is -1")):
        with pytest.raises(InvalidRunConfigException, match=words):
            apps.run(apps.role("true"), **cfg)


@pytest.mark.scenario("missing tool says what to install")
def test_a_machine_without_docker(apps: Apps) -> None:
    code = "import sys; sys.modules['docker'] = None; from torchx_monarch.schedulers import *; monarch_docker('torchx')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert "pip install 'docker>=7'" in done.stderr.splitlines()[-1]
    env = {**os.environ, "TORCHX_PLUGINS_SOURCE": "1", "DOCKER_HOST": "unix:///nonexistent"}
    done = subprocess.run([*TORCHX, "list", "-s", NAME], env=env, capture_output=True, text=True, timeout=240)
    assert "there is no Docker daemon at unix:///nonexistent" in done.stderr
    assert "Debian's package is docker.io" in done.stderr


def test_ctrl_c_cancels_what_is_waited_for(apps: Apps, daemon: Daemon) -> None:
    words = ["run", "-s", NAME, "--workspace", "", "--wait", "--log", "-cfg", "grace=5", "utils.sh"]
    words += ["--image", daemon.image, "--cpu", "1", "--memMB", "256", "--mounts", daemon.mount_words()]
    command = [*TORCHX, *words, "sh", "-c", "echo seen; trap 'echo bye; exit 0' TERM; sleep 1000 & wait"]
    env = {**os.environ, "TORCHX_PLUGINS_SOURCE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=env, **pipes) as torchx:  # type: ignore[call-overload]
        said = ""
        for line in torchx.stdout:
            said += line
            if "seen" in line:
                break
        torchx.send_signal(signal.SIGINT)
        said += torchx.stdout.read()
        assert torchx.wait(60) == 130, said
    handle = apps.adopt(re.findall(rf"{NAME}://torchx/[\w-]+", said)[0])
    assert f"cancelling {handle}" in said
    assert "Traceback" not in said
    assert apps.status(handle).state is AppState.CANCELLED


@pytest.mark.scenario("root cause in status")
def test_a_failing_rank_is_the_cause(apps: Apps) -> None:
    path = apps.program("""
        import os, time
        if os.environ["RANK"] == "3":
            raise ValueError("boom")
        time.sleep(1000)
    """)
    handle = apps.run(apps.torchrun(path))
    status = apps.wait(handle)
    assert status.state is AppState.FAILED
    error = json.loads(status.structured_error_msg)["message"]
    assert error["message"].startswith("rank 3 (local rank 1 on ")
    assert error["message"].endswith("ValueError: boom")
    assert error["errorCode"] == 1
    assert "ValueError: boom" in error["extraInfo"]["py_callstack"]
    assert "exited with code 1" in status.msg
    assert set(apps.states(handle).values()) == {AppState.FAILED}


def test_roles_are_worlds_and_all_but_sidecars_are_awaited(apps: Apps, eventually: Eventually) -> None:
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
    eventually(lambda: over.items() <= apps.states(handle).items(), "the end of the first role", seconds=60)
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


@pytest.mark.scenario("retries")
@pytest.mark.parametrize(
    ("replicas", "code", "retry_on", "starts", "why"),
    [
        (2, 78, "", 1, "exit code 78 (EX_CONFIG) asks for no restart"),
        (1, 3, "1", 1, "exit code 3 is not one of 1 (retry_on)"),
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
    # Who looks has ended it, or dockerd has tried as often as it was told to; nothing changes any more.
    time.sleep(1)
    assert apps.status(handle) == status
    assert json.loads(apps.torchx("status", "--json", handle))["num_restarts"] == starts - 1
