# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lose the leaders of jobs over a network: ``python -m tests.network.lost_leaders [TIMES] [WAY]``.

Each job has three machines (network namespaces), of which one is a spare. Host 0 is killed, or its machine is cut off
for as long as the job runs: then host 0 lives on, and must end by itself. A loss is recovered when the ranks have begun
again once, on the other two hosts, and the job has succeeded; that of a live allocation, when the client of its run, on
a fourth machine, has received the output of these ranks and the result. Prints the seconds from the loss to the first
of these ranks, or to the last line of them that the client has received.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.network.namespaces import Network, missing
from tests.network.test_live_take_over import LiveRun
from tests.network.test_take_over import Job

WAYS = {
    "killed": (False, False),
    "cut off": (False, True),
    "of a live run killed": (True, False),
    "of a live run cut off": (True, True),
}
"""For each way to lose a leader: whether it has a live allocation, and whether its machine is cut off."""


def _until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 120
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(what)
        time.sleep(0.05)


def lose(folder: Path, *, cut: bool) -> float:
    """Run a job that loses its leader; return the seconds until its ranks ran again.

    Raises:
        AssertionError: it has not gone on, or not as it should.
    """
    machines = Network(3)
    job = Job(machines, folder, 3, "2", "--spares", "1")
    try:
        _until(lambda: job.attempts(0) == ["0"] == job.attempts(1), "the first attempt")
        _until(lambda: "spare: host 2" in job.hosts.err(0), "the spare host")
        lost = time.time()
        machines.cut(0) if cut else job.kill(0)
        _until(lambda: job.attempts(1) == ["0", "1"] and job.attempts(2) == ["1"], f"the next attempt: {job.errors()}")
        first = min(job.begun(1, "1"), job.begun(2, "1"))
        code = job.hosts.processes[0].wait(120)
        codes = job.finish()
        assert codes == [code, 0, 0] and code == (1 if cut else -9) and job.attempts(0) == ["0"], (codes, job.errors())
        return first - lost
    finally:
        job.end()
        machines.remove()


def lose_live(folder: Path, *, cut: bool) -> float:
    """Lose the leader of a run on a live allocation; return the seconds until its client has the next attempt's lines.

    Raises:
        AssertionError: it has not gone on, or not as it should.
    """
    machines = Network(4)
    live = LiveRun(machines, folder)
    try:
        with machines.entered(3):
            _until(live.is_ready, "the hosts")
            live.begin()
            _until(lambda: live.lines.count("attempt 0") == 2, "the first attempt")
            lost = time.monotonic()
            live.lose(cut=cut)
            _until(lambda: live.lines.count("attempt 1") == 2, f"the next attempt: {live.hosts.err()}")
            seconds = time.monotonic() - lost
            live.finish(cut=cut)
            return seconds
    finally:
        live.end()
        machines.remove()


def main() -> int:
    """Lose so many leaders in each way, or in those with the given text; return the exit code."""
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    good = True
    for way, (is_live, cut) in WAYS.items():
        if len(sys.argv) > 2 and sys.argv[2] != way:
            continue
        seconds = []
        for _ in range(times):
            folder = Path(tempfile.mkdtemp(prefix="h"))
            try:
                seconds.append((lose_live if is_live else lose)(folder, cut=cut))
            except AssertionError as error:
                print(error, file=sys.stderr, flush=True)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        good = good and len(seconds) == times
        median = (
            f"median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f}" if seconds else "-"
        )
        print(f"leader {way}: {len(seconds)} of {times} went on, {median}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
