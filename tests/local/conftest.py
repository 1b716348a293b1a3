# SPDX-License-Identifier: BSD-3-Clause
"""What the tests that run host processes and programs share."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.detached import Detached


@pytest.fixture
def apps(leaves_nothing: None) -> Detached:
    """Apps on monarch_local, in the test's own state folder."""
    return Detached()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes the program of ranks, which knows ``rank`` and ``attempt``; its path."""

    def write(text: str) -> str:
        path = tmp_path / "prog.py"
        names = "('RANK', 'TORCHELASTIC_RESTART_COUNT')"
        start = f"import os, sys, time, signal\nrank, attempt = (int(os.environ[name]) for name in {names})\n"
        path.write_text(start + textwrap.dedent(text))
        return str(path)

    return write
