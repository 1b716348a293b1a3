# SPDX-License-Identifier: BSD-3-Clause
"""What several unit tests share."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    """A stream to a terminal that has colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main, other = os.openpty()
    with open(other, "w") as stream:
        yield stream
    os.close(main)
