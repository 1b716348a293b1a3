# SPDX-License-Identifier: BSD-3-Clause
"""Take the pictures of the report of a job: a real job with a restart, in a real browser (``make docs-pictures``)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.tools import browser

ROOT = Path(__file__).parents[2]
PICTURES = {"report_light.png": (1000, 1400, False), "report_phone.png": (390, 1130, True)}
"""The files in docs/pictures: width and height of the window, and whether it is dark."""

_PROGRAM = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
cache = []
for step in range(44):
    cache.append(torch.ones(500_000 * (rank + 2)))
    dist.all_reduce(torch.ones(1000))
    print(f"step {step}", flush=True) if rank == 0 else None
    time.sleep(0.5)
    if rank == 2 and attempt == 0 and step == 24:
        raise ValueError("loss is nan at step 24")
dist.destroy_process_group()
"""


def main() -> None:
    """Write the pictures."""
    path = browser.find()
    if path is None:
        sys.exit("no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        Path(folder, "train.py").write_text(_PROGRAM)
        torchx = [sys.executable, "-m", "torchx.cli.main"]
        job = [
            *("run", "-s", "monarch_local", "--wait", "monarch.spmd", "-j", "2x2", "--max_restarts", "2"),
            "train.py",
        ]
        # The report names the folder, so its name is that of nobody.
        environ = {**os.environ, "MONARCH_STATE_DIR": os.path.join(folder, "state")}
        subprocess.run([*torchx, *job], cwd=folder, env=environ, check=True, timeout=300)
        subprocess.run(
            [*torchx, "monarch", "report", "last", "-o", str(page)], cwd=folder, env=environ, check=True, timeout=60
        )
        page.write_text(page.read_text().replace(f"{folder}/state", "/home/me/.local/state/torchx-monarch"))
        with browser.started(path) as opened:
            for name, (width, height, dark) in PICTURES.items():
                opened.open(page, width, height, dark)
                (ROOT / "docs" / "pictures" / name).write_bytes(opened.picture())
                print(f"docs/pictures/{name}")


if __name__ == "__main__":
    main()
