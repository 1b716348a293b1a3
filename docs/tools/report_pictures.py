# SPDX-License-Identifier: BSD-3-Clause
"""Take the pictures of the pages about jobs: real jobs, in a real browser (``make docs-pictures``)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

from docs.tools import browser
from torchx_monarch.schedulers.recorded_apps import recorded_apps

ROOT = Path(__file__).parents[2]
PICTURES = {
    "report_light.png": ("", 1000, 1900, False),
    "report_phone.png": ("", 390, 1500, True),
    "compare.png": ("compare", 1000, 1000, False),
    "web_jobs.png": ("/", 1000, 220, False),
    "web_logs.png": ("/logs", 1000, 520, True),
}
"""The files in docs/pictures: the report, another file, or a page of ``torchx monarch web``; width and height of the
window, and whether it is dark."""

_PROGRAM = """
import math, os, random, time
import torch, torch.distributed as dist, torchx_monarch
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rate, cache = float(os.environ.get("LR", 0.1)), []
for step in range(20 * attempt, 70):
    cache.append(torch.ones(500_000 * (rank + 2)))
    time.sleep(0.5 + 0.3 * (rank == 1 and 40 < step < 55))
    dist.all_reduce(torch.ones(1000))
    loss = 2.3 * math.exp(-rate * step / 2) + 0.1 * random.random()
    torchx_monarch.progress(step, 69, checkpoint=step // 20 * 20, loss=loss)
    print(f"step {step}: loss {loss:.3f}", flush=True) if rank == 0 else None
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
        Path(folder, "train.py").write_text(_PROGRAM)
        # The pages name the folder, so its name is that of nobody.
        environ = {**os.environ, "MONARCH_STATE_DIR": os.path.join(folder, "state")}

        def torchx(*words: str) -> None:
            command = [sys.executable, "-m", "torchx.cli.main", *words]
            subprocess.run(command, cwd=folder, env=environ, check=True, timeout=300)

        run = ("run", "-s", "monarch_local", "--wait", "monarch.spmd", "--max_restarts", "2")
        torchx(*run, "-j", "1x2", "--name", "baseline", "--env", "LR=0.3", "train.py")
        torchx(*run, "-j", "2x2", "train.py")
        torchx("monarch", "report", "last", "-o", f"{folder}/report.html")
        with started_web(environ) as link, browser.started(path) as opened:
            os.environ["MONARCH_STATE_DIR"] = environ["MONARCH_STATE_DIR"]
            last, first = recorded_apps()
            torchx("monarch", "compare", first.app_id, last.app_id, "-o", f"{folder}/compare.html")
            opened.open(link, 1000, 400)  # sets the cookie
            for name, (page, width, height, dark) in PICTURES.items():
                if page.startswith("/"):
                    place = f"{link.partition('/?')[0]}{page}?{urlencode({'handle': last.handle})}"
                    opened.open(place, width, height, dark)
                    while page == "/logs" and "SUCCEEDED" not in opened.evaluate("document.body.innerText"):
                        time.sleep(0.1)
                else:
                    file = Path(folder, f"{page or 'report'}.html")
                    file.write_text(file.read_text().replace(f"{folder}/state", "/home/me/.local/state/torchx-monarch"))
                    opened.open(file, width, height, dark)
                (ROOT / "docs" / "pictures" / name).write_bytes(opened.picture())
                print(f"docs/pictures/{name}")


@contextlib.contextmanager
def started_web(environ: Mapping[str, str]) -> Iterator[str]:
    """Start ``torchx monarch web``; yield its link."""
    command = [sys.executable, "-m", "torchx_monarch.cli.main", "web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


if __name__ == "__main__":
    main()
