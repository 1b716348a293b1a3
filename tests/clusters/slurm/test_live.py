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
    assert Target.of(taken.handle, runner=apps.runner).address.host == "n1"
    _, kept = client_credentials.kept(NAME, taken.handle.rpartition("/")[2])
    port = kept["trainer"].rpartition(":")[2]
    job = SPMDJob.attach(taken.handle, address=f"{cluster.address(1)}:{port}", runner=apps.runner)
    job.wait_ready(60)
    runs_twice_and_after_a_failure(job, script, ["n1", "n1", "n2", "n2"])
    taken.release()
    apps.wait(taken.handle, AppState.CANCELLED)
