# SPDX-License-Identifier: BSD-3-Clause
"""Code that is brought to the nodes of a Slurm allocation, over TLS, before each run."""

from __future__ import annotations

from pathlib import Path

from torchx.specs import AppDef

from tests.clusters.slurm.apps import NAME, Apps
from tests.clusters.slurm.cluster import SlurmCluster
from torchx_monarch.backends.core import client_credentials
from torchx_monarch.client.allocation import Allocation
from torchx_monarch.client.result import RunResult
from torchx_monarch.client.serve import serve
from torchx_monarch.client.target import Target
from torchx_monarch.client.workspace_sync import sync_workspace

# The first test brings the cluster up, and may have to install it.


def said(result: RunResult) -> tuple[list[str], list[str]]:
    """Value and folder that each rank has printed, behind its prefix."""
    lines = [result.output[rank].stdout.partition(":")[2].split() for rank in (0, 1)]
    return [line[0] for line in lines], [line[1] for line in lines]


def test_nodes_get_changed_code_before_a_run(apps: Apps, cluster: SlurmCluster, tmp_path: Path) -> None:
    root = tmp_path / "ws"
    root.mkdir()
    for number in range(300):
        (root / f"module{number}.py").write_text(f"VALUE = {number}\n" * 100)
    program = "import os\nfrom module0 import VALUE\nprint(VALUE, os.getcwd(), flush=True)\n"
    (root / "train.py").write_text(program)
    app = AppDef("held", [apps.torchrun("train.py", nproc=1)])
    cfg = {"grace": 5, "preload": "none"}
    taken = serve(app, NAME, cfg, runner=apps.runner, idle_timeout=300)
    apps.adopt(taken.handle)
    # Slurm says which node it is; this machine knows it by its address alone.
    port = client_credentials.load(NAME, taken.handle.rpartition("/")[2]).rendezvous["trainer"].rpartition(":")[2]
    address = f"{cluster.address(1)}:{port}"
    with Allocation(taken.handle, address=address, runner=apps.runner, workspace=str(root)) as job:
        job.wait_ready(120)
        values, folders = said(job.run_spmd(output="store", sync="always"))
        assert values == ["0", "0"]
        assert len({*folders, str(root)}) == 3, "each node has a copy of its own"

        (root / "module0.py").write_text("VALUE = 'changed'\n")
        brought = sync_workspace(Target.from_handle(taken.handle, address=address), str(root), "always")
        assert brought.synced and 0 < brought.sent < 40_000
        result = job.run_spmd(output="store", sync="always")
        assert said(result)[0] == ["changed", "changed"]
        assert result.code == brought.code == job.runs()[-1]["code"]

        # All nodes see the folder here; by default they use it.
        assert said(job.run_spmd(output="store"))[1] == [str(root), str(root)]
    apps.until(lambda: apps.status(taken.handle).is_terminal(), "its end", taken.handle)
