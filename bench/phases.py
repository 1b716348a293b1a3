# SPDX-License-Identifier: BSD-3-Clause
"""Where the time of a launch through a Runner goes, phase by phase: ``python bench/phases.py [--rounds N]``.

The program is that of launch.py. The phases end with an event of the job, or with a time that the ranks have written;
medians with the least and the greatest, in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from launch import OURS, VARIANTS, Launch
from words import spread

PHASES = {
    "submitted": "the Runner imports TorchX and submits",
    "replica_started": "the supervisor starts the host",
    "hosts": "the host has started its zygote, and is ready for ranks",
    "first_line": "the zygote has imported torch: first line of the first rank",
    "last_line": "first line of the last rank",
    "group": "the group has formed",
    "end": "the last rank has called its exit handlers",
    "result": "the last rank has ended",
    "ended": "host and supervisor have ended the job",
    "total": "the Runner has seen it and ended",
}
"""What has happened at the end of each phase, by event or other time."""


def once(nproc: int, scratch: Path) -> dict[str, float]:
    """Seconds from the start of the command to the end of each phase, for one launch."""
    launch = Launch(VARIANTS[OURS], nproc, scratch)
    try:
        ended = {"total": launch.wait()}
        ranks = launch.ranks()
    finally:
        launch.finish()
    times = {"first_line": min(rank["first_line"] for rank in ranks)}
    times |= {"last_line": max(rank["first_line"] for rank in ranks)}
    times |= {name: max(rank[name] for rank in ranks) for name in ("group", "end")}
    [path] = (scratch / "state").rglob("events.jsonl")
    times |= {event["kind"]: event["time"] for event in map(json.loads, path.read_text().splitlines())}
    ended |= {name: time - launch.started for name, time in times.items()}
    return ended


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="launches of each number of ranks (default: 7)")
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 8], help="ranks per launch (default: 2 8)")
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs; seconds of each phase")
    columns: list[list[str]] = []
    for nproc in args.nproc:
        seconds: dict[str, list[float]] = {name: [] for name in PHASES}
        for _ in range(args.rounds):
            scratch = Path(tempfile.mkdtemp(prefix="bench-"))
            try:
                ended = once(nproc, scratch)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            before = 0.0
            for name in PHASES:
                seconds[name].append(ended[name] - before)
                before = ended[name]
        columns.append([spread(values) for values in seconds.values()])
    print(f"{'':<60}" + "".join(f"{f'{nproc} ranks':>22}" for nproc in args.nproc))
    for what, cells in zip(PHASES.values(), zip(*columns, strict=True), strict=True):
        print(f"{what:<60}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
