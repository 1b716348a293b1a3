# SPDX-License-Identifier: BSD-3-Clause
"""Programs of four ranks that hang in various ways, and such that only seem to.

``python -m tests.local.hang_programs 20`` runs each of them 20 times on one live allocation of two hosts, and says
which ones were named right, and how late.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.local.live import Live
from torchx_monarch.client.result import RunResult

HANG_AFTER = 3.0
"""Seconds; a busy machine may keep a rank of a healthy program from running for nearly as long."""

PROGRAM = '''
import ctypes, os, signal, sys, time
rank, how, hang_after, began = int(os.environ["RANK"]), sys.argv[1], float(sys.argv[2]), sys.argv[3]
import torch, torch.distributed as dist

def all_reduce(group=None):
    dist.all_reduce(torch.ones(7), group=group)

def begin():
    """Write when the others begin to wait, as far as this rank can tell."""
    with open(began, "w") as file:
        file.write(str(time.time()))

def hangs():
    begin()
    time.sleep(1000)

if how == "late_group" and rank == 3:
    time.sleep(2 * hang_after)
dist.init_process_group("gloo")
if how == "first" and rank == 3:
    hangs()
if how != "first":
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
for _ in range(3):
    all_reduce()
if how == "skips":
    if rank == 3:
        hangs()
    all_reduce()
elif how == "operations":
    calls = [all_reduce, lambda: dist.broadcast(torch.ones(7), 0)]
    begin()
    for call in reversed(calls) if rank == 3 else calls:
        call()
elif how == "shapes":
    begin()
    dist.all_gather([torch.ones(2)] * 4, torch.ones(2)) if rank == 3 else dist.all_reduce(torch.ones(9))
    all_reduce()
elif how == "subgroup":
    if rank == 3:
        hangs()
    elif rank == 2:
        all_reduce(groups[1])
    else:
        time.sleep(1000)
elif how == "chain":
    if rank == 3:
        hangs()
    elif rank == 2:
        all_reduce(groups[1])
    all_reduce()
elif how == "groups":
    more = dist.new_group([2, 3])
    begin()
    for group in (more, groups[1]) if rank == 3 else (groups[1], more):
        rank > 1 and all_reduce(group)
    time.sleep(1000)
elif how == "stopped":
    if rank == 3:
        begin()
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce()
elif how == "gil":
    if rank == 3:
        begin()
        ctypes.PyDLL(None).usleep(1_000_000_000)
    all_reduce()
elif how == "checkpoint":
    for _ in range(3):
        if rank == 0:
            time.sleep(0.6 * hang_after)
        dist.barrier()
elif how == "uneven":
    for step in range(18):  # together longer than it takes to be a hang
        time.sleep((rank + step) % 4 * 0.05 * hang_after)
        all_reduce(groups[rank // 2])
        all_reduce()
elif how == "silence":
    time.sleep(3 * hang_after)
    all_reduce()
dist.destroy_process_group()
'''

HANGS = {
    "skips": "rank 3 has not called gloo:all_reduce, number 4 of group 0, in which ranks 0-2 have waited",
    "operations": "rank 3 has called gloo:broadcast [7] as number 4 of group 0, the others gloo:all_reduce [7]; ",
    "shapes": "rank 3 has called gloo:all_gather as number 4 of group 0, the others gloo:all_reduce [9]; ",
    "first": "rank 3 has not called gloo:all_reduce, number 1 of group 0, in which ranks 0-2 have waited",
    "subgroup": "rank 3 has not called gloo:all_reduce, number 1 of group 2, in which rank 2 has waited",
    "chain": "rank 3 has not called gloo:all_reduce, number ",
    "groups": ": the order of calls differs",
    "stopped": "rank 3 does not answer, and has not called gloo:all_reduce, number 4 of group 0, in which ranks 0-2",
    "gil": "rank 3 does not answer, and has not called gloo:all_reduce, number 4 of group 0, in which ranks 0-2",
}
"""What is said of the programs that hang."""

HEALTHY = ("checkpoint", "uneven", "silence", "late_group")
"""The programs that do not hang."""


def allocation(folder: Path) -> tuple[Live, str]:
    """Two hosts on which the programs run, and the path of their text."""
    path = folder / "hang.py"
    path.write_text(PROGRAM)
    options = ("--grace", "1", "--hang-after", str(HANG_AFTER), "--on-hang", "fail")
    words = ["torchrun", "--nproc-per-node", "2", "--nnodes", "2", str(path)]
    return Live(folder, words, replicas=2, idle_timeout=300, options=options), str(path)


def run(hosts: Live, path: str, how: str) -> tuple[RunResult, float]:
    """How a program has ended, and after how many seconds beyond ``HANG_AFTER`` a hang was found."""
    began = hosts.folder / f"began_{time.monotonic_ns()}"
    result = hosts.run(path, how, str(HANG_AFTER), str(began))
    found = [event["time"] for event in hosts.events() if event["kind"] == "hang"]
    late = found[-1] - float(began.read_text()) - HANG_AFTER if found and began.exists() else 0.0
    return result, late


def main(count: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix="h"))
    hosts, path = allocation(folder)
    hosts.ready()
    failed = 0
    try:
        for how in (*HANGS, *HEALTHY):
            right, latest, others = 0, 0.0, set()
            for _ in range(count if how in HANGS else count // len(HEALTHY) + (count % len(HEALTHY) > 0)):
                result, late = run(hosts, path, how)
                is_right = HANGS[how] in result.reason if how in HANGS else result.exit_code == 0
                right, latest = right + is_right, max(latest, late)
                if not is_right:
                    failed += 1
                    others.add(result.reason)
            print(f"{how:<12}{right:>3} right, at most {latest:.1f} s late", *others, sep="\n    ", flush=True)
        print(sum(event["kind"] == "hang" for event in hosts.events()), "alarms in all")
        hosts.end()
    finally:
        hosts.kill()
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main(int(sys.argv[1])))
