# SPDX-License-Identifier: BSD-3-Clause
"""Every file is type-checked: a quarter of a minute of one core, beside other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_mypy_finds_nothing() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
