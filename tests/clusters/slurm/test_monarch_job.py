# SPDX-License-Identifier: BSD-3-Clause
"""A Monarch client on a login node, and its actors on the nodes of a real Slurm, over mutual TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm.apps import Apps
from tests.clusters.slurm.cluster import SlurmCluster

SERVICES = """
import json
import psutil
from monarch.job import MeshAdminConfig
from torchx_monarch import MonarchJob

job = MonarchJob({"trainers": 2, "loaders": 1}, "monarch_slurm", out_of_cluster={OUT})
job.enable_telemetry(include_dashboard=False, mesh_admin_config=MeshAdminConfig("127.0.0.1:0"))
state = job.state(cached_path=None)
for mesh in (state.trainers, state.loaders):
    mesh.spawn_procs().initialized.get(timeout=240)
listeners = [found.laddr.ip for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_LISTEN]
tables = state.query_engine_client.query("show tables", timeout=120)
job.kill()
print(json.dumps([str(tables), state.admin_url, [ip for ip in listeners if ip != "127.0.0.1"]]))
"""


def client(cluster: SlurmCluster, folder: Path, text: str) -> tuple[Any, str]:
    """Run a Monarch client on what is a login node, and knows the nodes by name: its last line as JSON, and stderr."""
    (folder / "client.py").write_text(text)
    words = f"mount --bind {cluster.conf.parent}/hosts /etc/hosts; exec {sys.executable} client.py"
    login = ["unshare", "--mount", "sh", "-c", words]
    done = subprocess.run(login, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.nightly("9 s of processor time each; monarch_local has both every time")
@pytest.mark.parametrize("out_of_cluster", [False, True])
def test_telemetry_and_the_mesh_admin_reach_the_nodes(
    apps: Apps, cluster: SlurmCluster, tmp_path: Path, out_of_cluster: bool
) -> None:
    """They are, in part, a process of their own, which is started before the hosts are known."""
    (tables, admin, listeners), log = client(cluster, tmp_path, SERVICES.replace("{OUT}", str(out_of_cluster)))
    assert "actors'" in tables and admin.startswith("https://")
    assert "failed" not in log, log
    # Hosts dial a client back, unless it goes through one of them.
    assert len(listeners) == (0 if out_of_cluster else 1)
