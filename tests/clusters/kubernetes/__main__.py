# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m tests.clusters.kubernetes build|up|down``: the tests' cluster, to be used by hand or by several runs.

``up`` prints the line that has kubectl, torchx and the tests use it; ``down`` ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil

from tests.clusters.kubernetes import cluster, server

_STATE = server.cache().parent / "kubernetes-up.json"

_DOWN_WITHIN = 20.0


def up() -> None:
    if _STATE.exists():
        sys.exit(f"it is up already, or was not ended well: see {_STATE}, and `down`")
    if reason := cluster.missing():
        sys.exit(reason)
    one = cluster.Cluster(owned=False).up()
    processes = [(process.pid, psutil.Process(process.pid).create_time()) for process in one.server.processes.values()]
    new = _STATE.with_suffix(".new")
    new.write_text(json.dumps({"folder": str(one.folder), "processes": processes}))
    new.rename(_STATE)
    print(f"export KUBECONFIG={one.kubeconfig} TEST_KUBECONFIG={one.kubeconfig} TEST_KUBE_IMAGE={one.image}")


def down() -> None:
    if not _STATE.exists():
        return
    state = json.loads(_STATE.read_text())
    for pid, created in reversed(state["processes"]):
        try:
            process = psutil.Process(pid)
            if process.create_time() != created:
                continue
            os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + _DOWN_WITHIN
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    shutil.rmtree(Path(state["folder"]), ignore_errors=True)
    _STATE.unlink()


def build() -> None:
    if reason := server.missing():
        sys.exit(reason)


if __name__ == "__main__":
    {"build": build, "up": up, "down": down}[sys.argv[1] if len(sys.argv) > 1 else "up"]()
