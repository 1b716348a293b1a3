# SPDX-License-Identifier: BSD-3-Clause
"""What is special about jobs on machines over ssh, and machines that cannot be used or are lost."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, Resource, RetryPolicy
from torchx.specs.finder import ComponentValidationException

from tests.clusters.ssh.apps import STATE, Apps
from tests.clusters.ssh.machine import USER
from tests.clusters.ssh.machines import DENIED, INNER, UNKNOWN, Machines
from tests.contract.place import TORCHX
from tests.waits import WITHIN, until

_WAITS = "echo up $$CUDA_VISIBLE_DEVICES; exec sleep 1000"


def test_machines_behind_a_jump_host_and_another_user(apps: Apps) -> None:
    handle = apps.run(
        apps.role("sh", "-c", "echo $$(hostname) $$(id -un)", replicas=2), hosts=[f"{INNER}3", f"{USER}@m2"]
    )
    apps.wait(handle, AppState.SUCCEEDED)
    assert [apps.lines(handle, k) for k in (0, 1)] == [["m3 root\n"], [f"m2 {USER}\n"]]


def test_two_jobs_on_a_machine_do_not_share_gpus(apps: Apps) -> None:
    tools = apps.folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(
        '#!/bin/sh\ntest $1 = -L && for i in 0 1 2; do echo "GPU $i: Stand-in"; done; true\n'
    )
    (tools / "nvidia-smi").chmod(0o755)
    cfg: dict[str, Any] = {"hosts": ["m1"], "setup": f"export PATH={tools}:$PATH"}
    role = apps.role("sh", "-c", _WAITS, resource=Resource(cpu=1, gpu=1, memMB=100))
    *handles, waiting = [apps.run(role, **cfg) for _ in range(4)]
    apps.until(lambda: all("up" in str(apps.lines(handle)) for handle in handles), "the start", handles[0])
    assert sorted(apps.lines(handle)[0] for handle in handles) == ["up 0\n", "up 1\n", "up 2\n"]
    assert json.loads(apps.torchx("status", "--json", waiting))["state"] == "PENDING"
    apps.runner.cancel(handles[1])
    apps.wait(handles[1], AppState.CANCELLED)
    freed = apps.lines(handles[1])[:1]
    apps.until(lambda: apps.lines(waiting) == freed, "the GPU that is free", waiting)
    with pytest.raises(RuntimeError, match="GPUs asked for by all roles .*: 4; this machine .* has 3"):  # never at once
        apps.run(*(apps.role("sh", "-c", _WAITS, name=name) for name in ("a", "b")), gpus=2, **cfg)


def test_a_job_outlives_the_folder_of_its_submitter(apps: Apps) -> None:
    handle = apps.run(apps.role("sh", "-c", _WAITS, replicas=2))
    shutil.rmtree(os.environ["MONARCH_STATE_DIR"])
    apps.until(lambda: "up" in str(apps.lines(handle)), "the start", handle)
    assert json.loads(apps.torchx("status", "--json", handle))["state"] == "RUNNING"
    apps.torchx("cancel", handle)
    apps.wait(handle, AppState.CANCELLED)


def test_another_machine_cancels(apps: Apps, machines: Machines) -> None:
    handle = apps.run(apps.role("sh", "-c", _WAITS), hosts=["m1"])
    apps.until(lambda: "up" in str(apps.lines(handle)), "the start", handle)
    cancel = shlex.join([*TORCHX, "cancel", handle])
    machines["m2"].run("sh", "-c", f"cd / && HOME=/root TORCHX_PLUGINS_SOURCE=1 {cancel}")
    apps.wait(handle, AppState.CANCELLED)
    machines["m2"].run("pkill", "-x", "ssh", check=False)
    shutil.rmtree(machines["m2"].path(STATE), ignore_errors=True)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_submission_that_is_ended_leaves_nothing(apps: Apps, machines: Machines, signum: signal.Signals) -> None:
    words = ["run", "-s", apps.name, *apps.run_words(), "--workspace", ""]
    words += ["utils.sh", "--num_replicas", "3", "sleep", "1000"]
    process = subprocess.Popen(
        [*TORCHX, *words],
        cwd=apps.folder,
        env={**os.environ, "TORCHX_PLUGINS_SOURCE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(1.4)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=WITHIN)
    handles = [word for word in said.split() if word.startswith(f"{apps.name}://")]
    for handle in handles:  # it was faster
        apps.runner.delete(apps.adopt(handle))
    until(lambda: not [*apps.running(), *apps.files()], f"nothing to be left: {said}", every=0.1)


def test_secrets_are_on_no_command_line(apps: Apps) -> None:
    """While a job is started and runs: of its key, of its environment."""
    seen: set[bytes] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    with contextlib.suppress(OSError):
                        seen.add((entry / "cmdline").read_bytes())
            time.sleep(0.01)

    token = uuid.uuid4().hex
    looker = threading.Thread(target=look)
    looker.start()
    try:
        handle = apps.run(apps.torchrun(apps.program("print(1)"), nproc=1, env={"TOKEN": token}))
        apps.wait(handle, AppState.SUCCEEDED)
    finally:
        done.set()
        looker.join(WITHIN)
    key, _ = apps.credentials(handle)
    assert len(key) > 500
    assert not [words for words in seen if token.encode() in words or key.encode() in words]


def _refused(apps: Apps, *hosts: str, **cfg: Any) -> str:
    """Submit to machines that cannot be used together; return the message. Nothing may be left."""
    with pytest.raises((ComponentValidationException, ValueError)) as caught:
        apps.run(apps.role("sleep", "1000", replicas=len(hosts)), hosts=list(hosts), **cfg)
    assert apps.files() == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("machine", "why"), [(UNKNOWN, "host key"), (DENIED, "permission denied"), ("no.such.machine.invalid", "resolve")]
)
def test_a_machine_that_cannot_be_reached_is_named(apps: Apps, machine: str, why: str) -> None:
    said = _refused(apps, "m2", machine)
    assert machine in said and why in said.lower(), said


def test_a_machine_without_power_is_named(apps: Apps, machines: Machines) -> None:
    machines["m3"].power_off()
    said = _refused(apps, "m1", "m3")
    assert "m3: ssh: connect to host" in said, said


def test_a_wrong_python_is_named(apps: Apps, tmp_path: Path) -> None:
    said = _refused(apps, "m1", "m2", python="/nonexistent/python")
    assert "/nonexistent/python" in said and "m1" in said, said
    said = _refused(apps, "m1", "m2", python="/usr/bin/env -i /usr/bin/false")
    assert "m1" in said, said


def test_a_full_disk_is_named(apps: Apps, machines: Machines) -> None:
    there = machines["m2"]
    there.run("mkdir", "-p", STATE)
    there.run("mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "small", STATE)
    try:
        there.run("sh", "-c", f"cat /dev/zero > {STATE}/filler || true")
        said = _refused(apps, "m1", "m2")
        assert "m2" in said and "no space left" in said.lower(), said
    finally:
        there.run("umount", STATE)


_SLEEPS = """
    import os, time
    print("rank", os.environ["RANK"], flush=True)
    time.sleep(1000)
"""


def test_the_job_fails_with_the_name_of_a_machine_without_power(apps: Apps, machines: Machines) -> None:
    apps.hosts = ["m1", "m2"]
    handle = apps.run(apps.torchrun(apps.program(_SLEEPS), nproc=1), hosts=apps.hosts, lease=5)
    apps.until(lambda: apps.log(handle).count("]:rank") == 2, "the ranks", handle)
    machines["m2"].power_off()
    # The other machine ends by itself, without any client.
    apps.until(lambda: not apps.running("m1"), "the end of the other machine's processes", handle)
    status = apps.wait(handle, AppState.FAILED)
    assert "m2" in status.msg + status.structured_error_msg, status
    machines.mend()
    assert apps.status(handle).state is AppState.FAILED


def test_a_job_of_before_a_reboot_has_failed_and_stays_so(apps: Apps, machines: Machines) -> None:
    role = apps.role("sh", "-c", "echo up; exec sleep 1000", max_retries=1, retry_policy=RetryPolicy.REPLICA)
    handle = apps.run(role, hosts=["m2"])
    apps.until(lambda: "up\n" in apps.lines(handle), "the start", handle)
    machines["m2"].reboot()
    status = apps.wait(handle, AppState.FAILED)
    assert "m2" in status.msg and "reboot" in status.msg, status
    assert apps.lines(handle) == ["up\n"] and not apps.running("m2")
