# SPDX-License-Identifier: BSD-3-Clause
"""The second run on a live allocation, beside a cold torchrun: ``python bench/rerun.py [--rounds N]``.

Measured is the time from the call (``SPMDJob.run_spmd``, the start of the torchrun process) to the first line of the
program after ``import torch``, on the last of the ranks. The allocation is one host of this machine. ``later`` is a
run that is begun a second after the one before has ended, ``at once`` the moment it has ended. The variants alternate;
medians with the least and the greatest, ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from words import spread

from torchx_monarch import SPMDJob, serve

PROGRAM = """
import os, sys, time
import torch
with open(sys.argv[1] + "/begun-" + os.environ["RANK"], "w") as file:
    file.write(str(time.time()))
"""


def until_begun(start: Callable[[], object], folder: str, nproc: int) -> float:
    """Seconds from the call to the last rank's first line."""
    for old in Path(folder).glob("begun-*"):
        old.unlink()
    began = time.time()
    start()
    return max(float(Path(folder, f"begun-{rank}").read_text()) for rank in range(nproc)) - began


def measured(job: SPMDJob, folder: str, words: list[str], nproc: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant."""
    times: dict[str, list[float]] = {"torchrun": [], "later": [], "at once": []}

    def torchrun() -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)

    def ours() -> None:
        job.run_spmd(words, output="none")

    def wait_warm() -> None:
        time.sleep(1.0)
        while not job.status().warm:
            time.sleep(0.2)

    ours()  # the first run on it
    wait_warm()
    for _ in range(rounds):
        times["torchrun"].append(until_begun(torchrun, folder, nproc))
        wait_warm()
        times["later"].append(until_begun(ours, folder, nproc))
        times["at once"].append(until_begun(ours, folder, nproc))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant (default: 5)")
    parser.add_argument("--nproc", type=int, default=4, help="ranks (default: 4)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MONARCH_STATE_DIR"] = f"{folder}/state"
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        words = ["torchrun", "--nproc-per-node", str(args.nproc), str(program), folder]
        with serve(words, idle_timeout=600) as job:
            job.wait_ready(warm=True)
            times = measured(job, folder, words, args.nproc, args.rounds)
        while job.status().state == "RUNNING":  # its folder is among those that go now
            time.sleep(0.1)
    cold = statistics.median(times["torchrun"])
    print(f"{os.cpu_count()} CPUs, {args.nproc} ranks; seconds from the call to the last rank's first line")
    for variant, values in times.items():
        print(f"{variant:>8}  {spread(values):>20}  {statistics.median(values) / cold:6.3f}x torchrun")
    if args.json:
        args.json.write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
