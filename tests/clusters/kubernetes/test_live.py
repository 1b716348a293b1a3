# SPDX-License-Identifier: BSD-3-Clause
"""Pods that wait for runs, reached through a forwarded port, and those of a controller script."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.kubernetes.apps import NAME, Apps
from tests.clusters.live import SAYS, runs_twice_and_after_a_failure
from torchx_monarch import SPMDJob, serve
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import AllocationError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_takes_two_pods_and_runs_in_them(apps: Apps, tmp_path: Path) -> None:
    path = apps.program(SAYS)
    cfg = {"grace": 5, "preload": "none", "namespace": apps.namespace, "mode": "job"}
    taken = serve(AppDef("live", [apps.torchrun(path, nproc=1)]), NAME, cfg, runner=apps.runner)
    name = taken.handle.rpartition(":")[2]
    apps.until(lambda: set(apps.states(taken.handle).values()) == {AppState.RUNNING}, "the pods", taken.handle)
    # From within the pods' network it is reached by its address.
    pod = next(one for one in apps.pods(taken.handle) if one["spec"]["hostname"].endswith("-trainer-0"))
    target = Target.from_handle(taken.handle, runner=apps.runner).address
    assert target.host == pod["status"]["podIP"]
    if apps.cluster.stand_ins is not None:
        with pytest.raises(AllocationError, match=rf"waiting for the hosts \(RUNNING\): {target.host}:{target.port}: "):
            SPMDJob.attach(taken.handle, runner=apps.runner).wait_ready(10)
    with apps.forwarded(taken.handle, target.port) as address:
        job = SPMDJob.attach(taken.handle, address=address, runner=apps.runner).wait_ready(90 * apps.patience)
        runs_twice_and_after_a_failure(job, path, [f"{name}-trainer-{k}" for k in (0, 1)])
        # By the command, with a program that is not there before.
        (apps.folder / "elsewhere").mkdir()
        (apps.folder / "elsewhere" / "train.py").write_text("import os; print('brought to', os.environ['RANK'])")
        words = ["torchrun", "--nproc-per-node", "2", "train.py"]
        told = apps.torchx("monarch", "exec", taken.handle, "--address", address, "--", *words)
        assert sorted(line.partition("]:")[2] or line for line in told.splitlines()) == [
            f"brought to {rank}" for rank in range(4)
        ]
        told = apps.torchx("monarch", "ps", taken.handle, "--address", address)
        assert [line.split()[1:3] for line in told.splitlines()[1:]][-2:] == [["failed", "7"], ["succeeded", "0"]]
    taken.release()
    assert apps.wait(taken.handle, AppState.CANCELLED).num_restarts == 0
