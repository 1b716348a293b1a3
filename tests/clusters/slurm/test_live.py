# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of a real Slurm that wait for runs."""

from __future__ import annotations

from torchx.specs import AppDef, AppState

from tests.clusters.live import SAYS, runs_twice_and_after_a_failure
from tests.clusters.slurm.apps import NAME, Apps
from tests.clusters.slurm.cluster import SlurmCluster
from torchx_monarch import SPMDJob, serve
from torchx_monarch.backends.core import client_credentials
from torchx_monarch.client.target import Target


def test_takes_two_nodes_and_runs_on_them(apps: Apps, cluster: SlurmCluster) -> None:
    script = apps.program(SAYS)
    cfg = {"grace": 5, "preload": "none"}
    taken = serve(AppDef("live", [apps.torchrun(script)]), NAME, cfg, runner=apps.runner)
    apps.adopt(taken.handle)
    apps.until(lambda: apps.status(taken.handle).state is AppState.RUNNING, "the job", taken.handle)
    # Slurm says which node it is; this machine knows it by its address alone.
    node = Target.from_handle(taken.handle, runner=apps.runner).address.host
    kept = client_credentials.load(NAME, taken.handle.rpartition("/")[2]).rendezvous
    port = kept["trainer"].rpartition(":")[2]
    address = f"{cluster.address(int(node.removeprefix('n')))}:{port}"
    job = SPMDJob.attach(taken.handle, address=address, runner=apps.runner)
    nodes = list(job.wait_ready(60).status().hosts.values())
    assert nodes[0] == node and len(set(nodes)) == 2
    runs_twice_and_after_a_failure(job, script, [name for name in nodes for _ in range(2)])
    taken.release()
    apps.wait(taken.handle, AppState.CANCELLED)
