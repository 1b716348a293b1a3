# SPDX-License-Identifier: BSD-3-Clause
"""What the conformance tests get: a way to run a command under torchrun and under a host process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.launchers import Launchers
from tests.conformance.recording import Recording


@pytest.fixture(scope="session")
def recorded(request: pytest.FixtureRequest) -> Recording:
    folder = request.config.getoption("--record-torchrun")
    return Recording(request.config.getoption("--torchrun") == "live", Path(folder) if folder else None)


@pytest.fixture
def both(
    recorded: Recording,
    leaves_nothing: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Launchers]:
    test = request.node.nodeid.partition("conformance/")[2]
    launchers = Launchers(recorded, test, tmp_path, monkeypatch, request.config.getoption("--ranks"))
    failed = request.session.testsfailed
    yield launchers
    if request.session.testsfailed == failed:
        launchers.keep()
