# SPDX-License-Identifier: BSD-3-Clause
"""From a killed rank to the next formed process group, beside torchrun: ``python bench/restart.py [--rounds N]``.

A rank of the first attempt kills itself with SIGKILL; measured is the time from just before that to the process group
that the last rank of the second attempt has formed, with the kill one second into the attempt. The variants alternate;
medians with the least and the greatest, ratios within a round.

torchrun is run with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with the store that it keeps over restarts otherwise, the new
ranks find the dead ones' Gloo addresses in it, and one restart in three fails or hangs (torch 2.13).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from words import spread

PROGRAM = """
import os, signal, sys, time
out = sys.argv[1]
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if attempt:
    with open(f"{out}/formed-{rank}", "w") as file:
        file.write(str(time.time()))
    time.sleep(0.5)  # a peer may still be reading what we have sent
    dist.destroy_process_group()
    sys.exit()
if rank == "1":
    time.sleep(1)
    with open(f"{out}/killed", "w") as file:
        file.write(str(time.time()))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""

COMMANDS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "ours": [sys.executable, "-m", "torchx_monarch.host", "--app", "bench", "--role", "bench", "--", "torchrun"],
}


def once(variant: str, nproc: int) -> float:
    """Seconds of one restart.

    Raises:
        RuntimeError: the job did not succeed in its second attempt.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        words = ["--nproc-per-node", str(nproc), "--max-restarts", "1", str(program), folder]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run([*COMMANDS[variant], *words], capture_output=True, text=True, timeout=120, env=env)
        if done.returncode:
            raise RuntimeError(f"{variant} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        killed = float(Path(folder, "killed").read_text())
        formed = max(float(Path(folder, f"formed-{rank}").read_text()) for rank in range(nproc))
        return formed - killed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="restarts of each variant (default: 5)")
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4], help="ranks (default: 2 4)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs; seconds from the kill to the next formed group")
    print(f"{'ranks':>5}  {'torchrun':>20}  {'ours':>20}  {'x torchrun':>20}")
    everything = []
    for nproc in args.nproc:
        times: dict[str, list[float]] = {variant: [] for variant in COMMANDS}
        for number in range(args.rounds):
            for variant in sorted(COMMANDS, reverse=number % 2 == 1):
                times[variant].append(once(variant, nproc))
        ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["torchrun"], strict=True)]
        cells = [spread(values) for values in (times["torchrun"], times["ours"], ratios)]
        print(f"{nproc:>5}  {cells[0]:>20}  {cells[1]:>20}  {cells[2]:>20}", flush=True)
        everything.append({"nproc": nproc, "seconds": times, "ratios": ratios})
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
