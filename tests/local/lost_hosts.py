# SPDX-License-Identifier: BSD-3-Clause
"""Measure how soon ranks run again after the loss of a host: ``python -m tests.local.lost_hosts [TIMES] [WAY]``.

Jobs on monarch_local of two hosts with a rank each, and torch preloaded, lose host 1, or host 0, which leads them. It
prints for each way to go on, or for those with WAY in their name, how many jobs have succeeded with their ranks
restarted once, and the median seconds from the loss to the first line of the next attempt.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torchx.specs import AppState, RetryPolicy

from tests.local.place import LocalPlace

_PROGRAM = """
import os, signal, time
print("line", os.environ["RANK"], os.environ["GROUP_RANK"], time.time(), flush=True)
lost = {lost!r}
if not os.path.exists(lost):
    time.sleep(1)
    if os.environ["RANK"] == {rank!r}:
        with open(lost + ".new", "w") as file:
            file.write(str(time.time()))
        os.rename(lost + ".new", lost)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""

WAYS: dict[str, dict[str, Any]] = {
    "a spare host": {"metadata": {"monarch": {"spares": 1}}},
    "the host replaced (max_retries, REPLICA)": {"max_retries": 1, "retry_policy": RetryPolicy.REPLICA},
    "host 0 replaced (max_retries, REPLICA)": {"rank": "0", "max_retries": 1, "retry_policy": RetryPolicy.REPLICA},
    "the job restarted (max_retries)": {"max_retries": 1},
}


def measure(folder: Path, rank: str = "1", **way: Any) -> float | None:
    """Run a job that loses a host; return the seconds until its ranks ran again, None if it has gone wrong."""
    place = LocalPlace(folder)
    lost = folder / "lost"
    try:
        program = place.program(_PROGRAM.format(lost=str(lost), rank=rank))
        handle = place.run(place.torchrun(program, nproc=1, **way), preload="torch")
        status = place.wait(handle, seconds=120)
        lines = place.log(handle, replicas=len(status.roles[0].replicas)).splitlines()
        found = [line.split("line ")[1].split() for line in lines if ":line " in line]
        again = [float(at) for _, _, at in found if float(at) > float(lost.read_text())]
        sound = [rank for rank, group, _ in found if rank == group]
        if status.state is not AppState.SUCCEEDED or sorted(sound) != ["0", "0", "1", "1"] or len(again) != 2:
            print(place.everything(handle), file=sys.stderr)
            return None
        return min(again) - float(lost.read_text())
    finally:
        place.close()


def main() -> None:
    """Measure all ways, or those that contain the given text."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    for name, way in WAYS.items():
        if wanted not in name:
            continue
        seconds = []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["MONARCH_STATE_DIR"] = str(Path(folder, "state"))
                seconds.append(measure(Path(folder), **way))
                time.sleep(0.2)
        good = [each for each in seconds if each is not None]
        median = f"{statistics.median(good):.2f} s, {min(good):.2f} to {max(good):.2f}" if good else "none"
        print(f"{name}: {len(good)} of {times} went on, {median}", flush=True)


if __name__ == "__main__":
    main()
