# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many hosts at once, simulated on one machine by the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "rendezvous.py"


def test_64_hosts_register_over_tls_and_learn_the_result(tmp_path: Path) -> None:
    table = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--hosts", "64", "--rounds", "1", "--alive", "0.1", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    (sample,) = json.loads(table.read_text())["hosts"]["64"]
    assert sample["retries"] == 0  # nobody was sent away, or had to wait for too long
    assert 0 < sample["memory"] < 160  # KiB of replica 0 for each host; asyncio's own buffers alone would be 256
    assert sample["result"] < 30
