# SPDX-License-Identifier: BSD-3-Clause
"""Machines that wait for runs, and those of a controller script."""

from __future__ import annotations

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.live import SAYS, runs_twice_and_after_a_failure
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
