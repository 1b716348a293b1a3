# SPDX-License-Identifier: BSD-3-Clause
"""One Docker daemon for all tests of a run, and apps on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.docker.apps import Apps
from tests.clusters.docker.daemon import Daemon, of_a_run


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """Skips the test where there can be none; in CI that is a mistake, and the test says so by failing."""
    yield from of_a_run()


@pytest.fixture
def apps(leaves_nothing: None, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apps]:
    """Apps on that daemon. What a test leaves of them is removed, and fails it."""
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    apps = Apps(daemon, tmp_path)
    yield apps
    apps.close()
    assert not daemon.left()
