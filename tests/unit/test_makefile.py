# SPDX-License-Identifier: BSD-3-Clause
"""What `make demo` tells somebody who sees the project for the first time."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_says_what_it_waits_for_and_what_to_try_next(tmp_path: Path) -> None:
    """Nothing runs (``-n``), as on a machine on which nothing is installed yet (``-B``)."""
    command = ["make", "-n", "-B", f"VENV={tmp_path}/venv", "demo"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    lines = said.splitlines()
    [installs] = [index for index, line in enumerate(lines) if "pip install" in line and "-e '.[" in line]
    assert " -q" in lines[installs] and "exit 1" in lines[installs]  # pip speaks only if it fails
    assert any(line.startswith('echo "Installing torch') for line in lines[:installs])
    [runs] = [index for index, line in enumerate(lines) if line.startswith("torchx run ")]
    assert "import of torch" in lines[runs - 1]
    rest = [shlex.split(line, comments=True)[1:] for line in lines[runs + 1 :]]
    assert any("Three things to try next" in " ".join(words) for words in rest)
    shown = [words[0].split("#")[0].split() for words in rest if words and words[0].startswith("  torchx")]
    assert len(shown) == 4  # the third thing takes two commands
    for words in shown:
        if words[1] == "run":
            dryrun = [sys.executable, "-m", "torchx.cli.main", "run", "--dryrun", *words[2:]]
            subprocess.run(dryrun, cwd=ROOT, capture_output=True, timeout=120, check=True)
