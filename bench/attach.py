# SPDX-License-Identifier: BSD-3-Clause
"""What ranks notice of a Monarch client: ``python bench/attach.py [--rounds N] [--seconds N] [--hosts N]``.

A batch job of two ranks on this machine, whose steps are an all_reduce over Gloo, runs on while a client attaches,
spawns an actor on each host, calls it, and detaches. Measured are the steps per second of rank 0 before, while the
client attaches and spawns, while its actors are idle, while they are called one call after the other, and after it has
detached, and the longest step of each phase. Medians of the rounds with the least and the greatest.

Ranks, client and actors share the machine: with fewer CPUs than processes that are busy, the client takes its share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from torchx.runner import get_runner
from words import spread

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value, stop, ends = torch.ones(1000), torch.zeros(1), []
dist.barrier()
open(sys.argv[1] + "/begun", "w").close()
while not stop.item():
    dist.all_reduce(value.fill_(1.0))
    ends.append(time.time())
    if len(ends) % 100 == 0:
        stop.fill_(os.path.exists(sys.argv[1] + "/stop"))
        dist.broadcast(stop, 0)
rank = dist.get_rank()
dist.destroy_process_group()
if rank == 0:
    with open(sys.argv[1] + "/steps.new", "w") as file:
        file.write(" ".join(map(repr, ends)))
    os.rename(sys.argv[1] + "/steps.new", sys.argv[1] + "/steps")
"""

CLIENT = """
import json, os, sys, time
from torchx_monarch import SPMDJob
from monarch.actor import Actor, endpoint

class Echo(Actor):
    @endpoint
    def echo(self, number):
        return number

seconds, times = float(sys.argv[2]), [time.time()]
actors = SPMDJob.attach(sys.argv[1]).state(cached_path=None).workers.spawn_procs().spawn("echo", Echo)
actors.echo.call(0).get(timeout=120)
times.append(time.time())
time.sleep(seconds)
times.append(time.time())
calls = 0
while time.time() < times[-1] + seconds:
    actors.echo.call(calls).get(timeout=120)
    calls += 1
times.append(time.time())
print(json.dumps([times, calls]), flush=True)
os._exit(0)
"""

PHASES = ("before", "attach and spawn", "idle actors", "calls", "after")

_END = 2.0
"""Seconds after the client for the end of its worker loops and actors, which belong to no phase."""


def measure(seconds: float, hosts: int) -> tuple[dict[str, tuple[float, float]], float]:
    """Run a job and a client; return steps per second and the longest step of each phase, and calls per second.

    Raises:
        RuntimeError: the job has not succeeded.
    """
    with tempfile.TemporaryDirectory() as folder, get_runner() as runner:
        os.environ["MONARCH_STATE_DIR"] = f"{folder}/state"
        for name, text in (("program.py", PROGRAM), ("client.py", CLIENT)):
            Path(folder, name).write_text(text)
        words = ["-j", f"{hosts}x{2 // hosts}", f"{folder}/program.py", folder]
        handle = runner.run_component("monarch.spmd", words, "monarch_local")
        try:
            while not Path(folder, "begun").exists():
                time.sleep(0.1)
            time.sleep(seconds)
            client = [sys.executable, f"{folder}/client.py", handle, str(seconds)]
            said = subprocess.run(client, capture_output=True, text=True, timeout=300, check=True).stdout
            times, calls = json.loads(said.splitlines()[-1])
            time.sleep(_END + seconds)
            Path(folder, "stop").touch()
            status = runner.wait(handle, wait_interval=0.1)
        finally:
            runner.cancel(handle)
        if status is None or status.state.name != "SUCCEEDED":
            raise RuntimeError(f"the job has not succeeded: {status}")
        ends = [float(word) for word in Path(folder, "steps").read_text().split()]
    borders = [
        *((times[0] - seconds, times[0]), (times[0], times[1]), (times[1], times[2]), (times[2], times[3])),
        (times[3] + _END, times[3] + _END + seconds),
    ]
    found = {}
    for phase, (start, end) in zip(PHASES, borders, strict=True):
        steps = [step for step in ends if start <= step < end]
        longest = max(later - earlier for earlier, later in pairwise(steps))
        found[phase] = (len(steps) / (end - start), longest)
    return found, calls / (times[3] - times[2])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="jobs (default: 3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each phase (default: 5)")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=2, help="hosts of the two ranks (default: 2)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    rounds = [measure(args.seconds, args.hosts) for _ in range(args.rounds)]
    print(f"{os.cpu_count()} CPUs, 2 ranks on {args.hosts} hosts, {args.rounds} jobs")
    print(f"{'':>16}  {'steps per second':>28}  {'longest step, ms':>24}")
    for phase in PHASES:
        rates = spread([found[phase][0] for found, _ in rounds], 0)
        longest = spread([found[phase][1] * 1000 for found, _ in rounds], 1)
        print(f"{phase:>16}  {rates:>28}  {longest:>24}")
    print(f"calls per second: {spread([calls for _, calls in rounds], 0)}")
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
