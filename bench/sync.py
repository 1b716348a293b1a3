# SPDX-License-Identifier: BSD-3-Clause
"""What it costs that hosts get the code before each run: ``python bench/sync.py [--files N] [--scheduler NAME]``.

A workspace of 10,000 small files is brought to two live hosts, each of which gets a copy of its own. Measured are the
first time (with other contents in each round), the time when nothing has changed, and that when one file has: until
replica 0 has the workspace, and from the call of ``run_spmd()`` to the first line of the program on the last rank,
which has torch imported. Medians in seconds with the least and the greatest. ext4 without a journal makes files slowly
for a minute after others were removed: there, set TMPDIR and MONARCH_STATE_DIR to folders on another file system.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from words import spread

from torchx_monarch.backends.core import stored_apps
from torchx_monarch.client.connection import Target
from torchx_monarch.client.job import SPMDJob
from torchx_monarch.client.serve import serve
from torchx_monarch.client.workspace_sync import sync_workspace

PROGRAM = """
import time
import torch
print(time.time(), {number}, flush=True)
"""


def make(root: Path, files: int, version: int) -> None:
    """Write a workspace of that many files of 2 kB, 100 in a folder, and patterns as a repository has them."""
    for number in range(files - 2):
        folder = root / f"package{number // 100}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_text(f"# {version} {number}\n" + "value = 1\n" * 200)
    (root / ".gitignore").write_text("".join(f"*.kind{number}\nbuild{number}/\n" for number in range(50)))
    change(root, 0)


def change(root: Path, number: int) -> None:
    """Save another version of the program."""
    (root / "train.py").write_text(PROGRAM.format(number=number))


def port_of(handle: str) -> str:
    """Where replica 0 of an app listens that runs elsewhere."""
    scheduler, _, app_id = handle.partition("://")[0], *handle.rpartition("/")[1:]
    kept = stored_apps.load_credentials(scheduler, app_id).rendezvous
    return next(iter(kept.values())).rpartition(":")[2]


def seconds_of_sync(target: Target, root: Path) -> float:
    start = time.perf_counter()
    sync_workspace(target, str(root), "always")
    return time.perf_counter() - start


def seconds_to_first_line(job: SPMDJob, number: int) -> float:
    """Run the program, of which the lines end with a number."""
    job.wait_ready(warm=True)
    called = time.time()
    output = job.run_spmd(output="store").output
    lines = [output[rank].stdout.split() for rank in (0, 1)]
    assert all(line[1] == str(number) for line in lines), lines
    return max(float(line[0]) for line in lines) - called


def row(what: str, times: list[float]) -> None:
    """Print one line of the table."""
    print(f"| {what} | {spread(times)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scheduler", default="monarch_local")
    parser.add_argument("--cfg", action="append", default=[], metavar="NAME=VALUE", help="its run options")
    parser.add_argument("--host", help="where replica 0 is reached, if not by the name that the scheduler gives it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "workspace")
        root.mkdir()
        cfg: dict[str, Any] = dict(pair.split("=", 1) for pair in args.cfg)
        command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "train.py"]
        taken = serve(command, args.scheduler, cfg, idle_timeout=600)
        address = f"{args.host}:{port_of(taken.handle)}" if args.host else ""
        with SPMDJob(taken.handle, address=address, workspace=str(root), sync="always") as job:
            job.wait_ready(warm=True)
            target = Target.from_handle(taken.handle, address=address)
            print(
                f"\n| {args.files} files, 2 hosts, {args.scheduler}, {os.cpu_count()} processors | seconds |\n|---|---|"
            )
            synced: list[float] = []
            begun: list[float] = []
            for version in range(args.rounds):
                make(root, args.files, 2 * version)
                synced.append(seconds_of_sync(target, root))
                make(root, args.files, 2 * version + 1)
                begun.append(seconds_to_first_line(job, 0))
            row("the first time", synced)
            row("run_spmd() to the first line, the first time", begun)
            row("nothing has changed", [seconds_of_sync(target, root) for _ in range(args.rounds)])
            synced, begun, again = [], [], list[float]()
            for number in range(1, args.rounds + 1):
                change(root, number)
                time.sleep(1.0)  # an editor's user is no faster
                job.wait_ready(warm=True)
                synced.append(seconds_of_sync(target, root))
                change(root, -number)
                begun.append(seconds_to_first_line(job, -number))
                again.append(seconds_to_first_line(job, -number))
            row("one file has changed", synced)
            row("run_spmd() to the first line, one file changed", begun)
            row("run_spmd() to the first line, nothing changed", again)


if __name__ == "__main__":
    main()
