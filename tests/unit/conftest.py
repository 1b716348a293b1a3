# SPDX-License-Identifier: BSD-3-Clause
"""What several unit tests share."""

from __future__ import annotations

import io
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchx_monarch.transport.connections import Address


@pytest.fixture
def address(leaves_nothing: None) -> Address:
    """A socket file, by a path that is short enough."""
    return Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    """A stream to a terminal that has colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main, other = os.openpty()
    with open(other, "w") as stream:
        yield stream
    os.close(main)


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Have signals end this process as they end a program, and SIGINT raise KeyboardInterrupt, during the test."""
    handlers: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
