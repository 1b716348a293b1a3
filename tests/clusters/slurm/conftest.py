# SPDX-License-Identifier: BSD-3-Clause
"""One cluster for all tests of this folder, and TorchX's Runner on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.packages import skip_for
from tests.clusters.slurm.apps import Apps
from tests.clusters.slurm.cluster import SlurmCluster, missing
from tests.waits import until


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """Five nodes, and five hundred that are away."""
    skip_for(missing())
    cluster = SlurmCluster(5, away=500)
    try:
        yield cluster.up()
    finally:
        cluster.down()
    until(lambda: cluster.left() == [], lambda: f"the end of {cluster.left()}")


@pytest.fixture
def apps(
    cluster: SlurmCluster, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Apps]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    apps = Apps(cluster, tmp_path)
    yield apps
    apps.close()
