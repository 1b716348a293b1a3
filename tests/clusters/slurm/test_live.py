# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of a real Slurm that wait for runs."""

from __future__ import annotations

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.slurm.apps import NAME, Apps, spmd
from tests.clusters.slurm.cluster import SlurmCluster
from torchx_monarch import SPMDError, SPMDJob, serve
from torchx_monarch.backends import clients
from torchx_monarch.client.target import Target

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("slurm")]


def test_takes_two_nodes_and_runs_on_them(apps: Apps, cluster: SlurmCluster) -> None:
    script = apps.script("""
        import os, sys
        print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)
        sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "3" else 0)
    """)
    cfg = {"grace": 5, "preload": "none"}
    taken = serve(AppDef("live", [spmd(script, args=("0",))]), NAME, cfg, runner=apps.runner)
    apps.adopt(taken.handle)
    apps.until(lambda: apps.status(taken.handle).state is AppState.RUNNING, "the job", taken.handle)
    # Slurm says which node it is; this machine knows it by its address alone.
    assert Target.of(taken.handle, runner=apps.runner).address.host == "n1"
    _, kept = clients.kept(NAME, taken.handle.rpartition("/")[2])
    port = kept["trainer"].rpartition(":")[2]
    job = SPMDJob.attach(taken.handle, address=f"{cluster.address(1)}:{port}", runner=apps.runner)
    job.wait_ready(60)
    for _ in range(2):
        result = job.run_spmd(output="store")
        shown = {rank: one.stdout for rank, one in result.output.items()}
        assert shown == {rank: f"[default{rank}]:rank {rank} on n{rank // 2 + 1}\n" for rank in range(4)}
        with pytest.raises(SPMDError) as caught:
            job.run_spmd([str(script), "7"], output="none")
        assert caught.value.result.exit_code == 7 and caught.value.root_cause.hostname == "n2"
    assert job.status().hosts == {0: "n1", 1: "n2"}
    taken.kill()
    apps.wait(taken.handle, AppState.CANCELLED)
