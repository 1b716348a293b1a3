# SPDX-License-Identifier: BSD-3-Clause
"""The smallest distributed program: import torch, form a Gloo group, one all_reduce, one line, exit.

Each rank leaves OUT/RANK.json with the times (seconds since the epoch) of its first line, of the formed group and of
its end, and, before it sleeps, OUT/RANK.pid.
"""

import time

FIRST_LINE = time.time()

import argparse  # noqa: E402
import atexit  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--sleep", type=float, default=0.0)
args = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
times = {"first_line": FIRST_LINE}


def write() -> None:
    times["end"] = time.time()
    (args.out / f"{rank}.json").write_text(json.dumps(times))


# Registered before torch is imported, hence called after everything that torch registers. It overwrites what the last
# line wrote, which stays only where a launcher kills the interpreter instead of letting it end.
atexit.register(write)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
times["group"] = time.time()
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
assert value.item() == world_size * (world_size + 1) / 2, value
print(f"rank {rank} of {world_size}: {value.item():.0f}", flush=True)
if args.sleep:
    (args.out / f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(args.sleep)
dist.destroy_process_group()
write()
