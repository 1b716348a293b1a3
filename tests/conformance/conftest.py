# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the conformance tests get: a way to run a command under torchrun and under a host process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.launchers import Launchers, TorchrunServer


@pytest.fixture(scope="session")
def torchrun_server() -> Iterator[TorchrunServer]:
    server = TorchrunServer()
    yield server
    server.close()


@pytest.fixture
def both(
    torchrun_server: TorchrunServer, leaves_nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Launchers:
    return Launchers(torchrun_server, tmp_path, monkeypatch)
