# SPDX-License-Identifier: BSD-3-Clause
"""Machines that wait for runs, and those of a controller script."""

from __future__ import annotations

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.live import SAYS, controller, had_all_meshes, runs_twice_and_after_a_failure
from tests.clusters.ssh.apps import NAME, Apps
from torchx_monarch import SPMDJob, serve

pytestmark = [pytest.mark.slow]


def test_takes_two_machines_and_runs_on_them(apps: Apps) -> None:
    path = apps.program(SAYS)
    taken = serve(AppDef("live", [apps.torchrun(path, nproc=1)]), NAME, apps.cfg, runner=apps.runner)
    apps.adopt(taken.handle)
    job = SPMDJob.attach(taken.handle, runner=apps.runner)
    job.wait_ready(90)
    runs_twice_and_after_a_failure(job, path, [apps.hostname(taken.handle, k) for k in (0, 1)])
    told = apps.torchx("monarch", "exec", taken.handle, "--", path)
    assert told.count("rank ") == 2, told
    taken.release()
    assert apps.wait(taken.handle).state is AppState.CANCELLED


@pytest.mark.nightly("4 s of processor time; Docker and Slurm have this every time")
def test_a_controller_has_the_meshes_of_all_roles(apps: Apps) -> None:
    handle = apps.run(*controller(apps.role))
    status = apps.wait(handle, AppState.FAILED)
    had_all_meshes(apps.log(handle, "trainers"), status)


@pytest.mark.nightly("an elastic size, the machines from a file: what they become is table-tested every time")
def test_machines_from_a_file_are_an_elastic_job(apps: Apps) -> None:
    listed = apps.folder / "machines"
    listed.write_text("# two of three\n" + "\n".join(apps.hosts[:2]) + "\n")
    role = apps.role(
        "torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", "--tee", "3", apps.program(SAYS), replicas=2
    )
    role.min_replicas = 1
    handle = apps.run(role, hosts=[f"@{listed}"])
    apps.wait(handle, AppState.SUCCEEDED)
    assert apps.log(handle).count("rank ") == 2
