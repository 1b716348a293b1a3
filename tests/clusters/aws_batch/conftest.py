# SPDX-License-Identifier: BSD-3-Clause
"""moto's AWS over HTTP, with and without a Docker daemon that runs the jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.aws_batch.apps import CREDENTIALS, Apps, Aws, definitions, with_docker
from tests.clusters.docker.daemon import Daemon, of_a_run


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some, and nothing of the machine's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))


@pytest.fixture(scope="session")
def aws() -> Iterator[Aws]:
    """Where jobs succeed at once."""
    cloud = Aws("simple")
    yield cloud
    cloud.stop()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """Skips the test where there can be none; in CI that is a mistake, and the test says so by failing."""
    yield from of_a_run()


@pytest.fixture(scope="session")
def aws_with_docker(daemon: Daemon) -> Iterator[Aws]:
    """Where jobs are containers."""
    cloud = with_docker(daemon)
    yield cloud
    cloud.stop()


def _apps(aws: Aws, apps: Apps) -> Iterator[Apps]:
    yield apps
    apps.close()
    assert not definitions(aws.client("batch"))
    assert not aws.client("secretsmanager").list_secrets()["SecretList"]


@pytest.fixture
def apps(
    leaves_nothing: None, credentials: None, aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Apps]:
    """Apps whose jobs succeed at once. What a test leaves of them is removed, and fails it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    yield from _apps(aws, Apps(tmp_path))


@pytest.fixture
def running_apps(
    leaves_nothing: None,
    credentials: None,
    aws_with_docker: Aws,
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Apps]:
    """Apps whose jobs are containers."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_with_docker.url)
    yield from _apps(
        aws_with_docker, Apps(tmp_path, "tests:latest", daemon.mounts(tmp_path), f"/proc/{daemon.first}/ns/net")
    )
