# SPDX-License-Identifier: BSD-3-Clause
"""One cluster for all tests of a run, and apps on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.kubernetes.apps import Apps
from tests.clusters.kubernetes.cluster import Cluster, missing
from tests.clusters.packages import skip_for


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Skips the test where there can be none; in CI that is a mistake, and the test says so by failing."""
    skip_for(missing())
    started = Cluster().up()
    yield started
    started.down()


@pytest.fixture
def apps(leaves_nothing: None, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apps]:
    """Apps on that cluster. What a test leaves of them is removed, and fails it."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    apps = Apps(cluster, tmp_path)
    yield apps
    apps.close()
