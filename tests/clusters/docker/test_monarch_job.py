# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Monarch client beside a Docker daemon, and its actors in containers, over mutual TLS."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROGRAM = """
import json, os, pickle, sys
from monarch.actor import Actor, endpoint
from torchx_monarch import MonarchJob

class Where(Actor):
    @endpoint
    def am_i(self):
        return os.uname().nodename

job = MonarchJob(pickle.load(open("app.pkl", "rb")), "monarch_docker", start_timeout=60)
state = job.state(cached_path=None)
places = {}
for name in ("trainers", "loaders"):
    answers = getattr(state, name).spawn_procs().spawn("where", Where).am_i.call().get(timeout=60)
    places[name] = len({place for _, place in answers} - {os.uname().nodename})
handle = job.handle
job.kill()
print(json.dumps([handle, places]))
"""


def test_actors_run_in_containers(apps: Apps, daemon: Daemon, tmp_path: Path) -> None:
    app = AppDef("app", [apps.role("x", name="trainers", replicas=2), apps.role("x", name="loaders")])
    (tmp_path / "app.pkl").write_bytes(pickle.dumps(app))
    (tmp_path / "client.py").write_text(PROGRAM)
    # The daemon has its bridge in a network namespace of its own.
    command = ["nsenter", f"--net=/proc/{daemon.first}/ns/net", sys.executable, "client.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    handle, places = json.loads(done.stdout.splitlines()[-1])
    apps.adopt(handle)
    assert places == {"trainers": 2, "loaders": 1}
    assert handle.startswith(f"{NAME}://")
    assert apps.wait(handle).state is AppState.CANCELLED
