# SPDX-License-Identifier: BSD-3-Clause
"""Containers that wait for runs, and those of a controller script."""

from __future__ import annotations

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon
from tests.clusters.live import SAYS, controller, had_all_meshes, runs_twice_and_after_a_failure
from tests.network.namespaces import entered
from torchx_monarch import SPMDJob, serve

pytestmark = [pytest.mark.slow]


def test_takes_two_containers_and_runs_in_them(apps: Apps, daemon: Daemon) -> None:
    path = apps.program(SAYS)
    taken = serve(
        AppDef("live", [apps.torchrun(path, nproc=1)]), NAME, {"grace": 5, "preload": "none"}, runner=apps.runner
    )
    apps.adopt(taken.handle)
    job = SPMDJob.attach(taken.handle, runner=apps.runner)  # by the container's address
    with entered(f"/proc/{daemon.first}/ns/net"):  # where the daemon has its bridge
        job.wait_ready(90)
        runs_twice_and_after_a_failure(job, path, [apps.hostname(taken.handle, k) for k in (0, 1)])
    taken.release()
    assert apps.wait(taken.handle).state is AppState.CANCELLED


def test_a_controller_has_the_meshes_of_all_roles(apps: Apps) -> None:
    handle = apps.run(*controller(apps.role))
    status = apps.wait(handle)
    assert status.state is AppState.FAILED
    had_all_meshes(apps.log(handle, "trainers"), status)
