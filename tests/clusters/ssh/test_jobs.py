# SPDX-License-Identifier: BSD-3-Clause
"""What is special about jobs on machines over ssh."""

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
from torchx.specs import AppState, Resource

from tests.clusters.ssh.apps import STATE, Apps
from tests.clusters.ssh.machine import USER
from tests.clusters.ssh.machines import INNER, Machines
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
    apps.until(lambda: "up\n" in str(apps.lines(handle)) or "up" in str(apps.lines(handle)), "the start", handle)
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
