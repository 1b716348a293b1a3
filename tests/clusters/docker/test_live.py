# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Containers that wait for runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon
from tests.clusters.live import SAYS, runs_twice_and_after_a_failure
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


@pytest.mark.nightly("12 s of processor time; tests/network has a run that goes on under another host every time")
def test_a_run_goes_on_when_the_container_of_replica_0_is_removed(
    apps: Apps, daemon: Daemon, eventually: Callable[..., object]
) -> None:
    path = apps.program(f"""
        import os, time
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        while not os.path.exists({str(apps.folder / "go")!r}):
            time.sleep(0.1)
    """)
    role = apps.torchrun(path, nproc=1, metadata={"monarch": {"spares": 1}})
    taken = serve(AppDef("live", [role]), NAME, {"grace": 5, "preload": "none"}, runner=apps.runner)
    apps.adopt(taken.handle)
    lines: list[str] = []
    with entered(f"/proc/{daemon.first}/ns/net"):
        job = SPMDJob.attach(taken.handle, runner=apps.runner).wait_ready(90)
        eventually(lambda: "spare: host 2" in apps.log(taken.handle), "the spare host")
        run = job.run_spmd_async(output=lambda rank, stream, text: lines.append(text), check=False)
        eventually(lambda: "".join(lines).count("attempt 0") == 2, "the first attempt")
        with contextlib.closing(daemon.client()) as client:
            client.containers.get(apps.hostname(taken.handle, 0)).remove(force=True)
        eventually(lambda: "".join(lines).count("attempt 1") == 2, "the attempt under host 1")
        (apps.folder / "go").touch()
        assert run.result(60).exit_code == 0
        assert sorted(job.status().hosts) == [1, 2]
    taken.release()
    apps.wait(taken.handle, AppState.CANCELLED)
