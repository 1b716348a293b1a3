# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Monarch client beside a Docker daemon, and its actors in containers, over mutual TLS."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchx.specs import AppDef, AppState

from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon
from tests.clusters.live import actors, controller, had_all_meshes

pytestmark = [pytest.mark.slow]


@pytest.mark.nightly("4 s of processor time; Kubernetes has this every time")
def test_actors_run_in_containers(apps: Apps, daemon: Daemon, tmp_path: Path) -> None:
    app = AppDef("app", [apps.role("x", name="trainers", replicas=2), apps.role("x", name="loaders")])
    # The daemon has its bridge in a network namespace of its own.
    handle, places = actors(app, NAME, {}, f"/proc/{daemon.first}/ns/net", tmp_path)
    apps.adopt(handle)
    assert places == {"trainers": 2, "loaders": 1}
    assert handle.startswith(f"{NAME}://")
    assert apps.wait(handle).state is AppState.CANCELLED


def test_a_controller_has_the_meshes_of_all_roles(apps: Apps) -> None:
    handle = apps.run(*controller(apps.role))
    status = apps.wait(handle)
    assert status.state is AppState.FAILED
    had_all_meshes(apps.log(handle, "trainers"), status)
