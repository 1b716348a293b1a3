# SPDX-License-Identifier: BSD-3-Clause
"""What each rank of a soak runs: it works for some time, prints, and leaves a proof of each step in a folder.

    begin-RANK-PID    the rank runs; JSON: rank, world size, attempt, pid, pid of its host
    out-RANK-PID      one line for each line that was printed to stdout, appended after the line was flushed
    err-RANK-PID      the same for stderr
    end-RANK-PID      the rank has reached its end; the same JSON as begin

Arguments: FOLDER SECONDS CHILDREN FAILS. With FAILS, rank 0 exits with code 3 once in the life of the job.
"""

import json
import os
import signal
import subprocess
import sys
import time

STEP = 0.05
"""Seconds between two bursts of lines."""

ENDING = 0.2
"""Seconds from the proof of a rank's end to its end: what happens to a rank that ends must find it."""

FAILS_WITHIN = 10
"""Steps until the failure that is asked for, at most."""

CODE = 3
"""Exit code of the failure that is asked for."""


def line(stream: str, rank: int, pid: int, number: int) -> str:
    """The text of one line; every eighth is longer than what a pipe takes as one piece."""
    return f"{stream} {rank} {pid} {number} {'x' * (6000 if number % 8 == 7 else number % 50)} end"


def _prove(folder: str, kind: str) -> None:
    environ = os.environ
    proof = {
        "rank": int(environ["RANK"]),
        "world": int(environ["WORLD_SIZE"]),
        "attempt": f"{environ['TORCHELASTIC_RESTART_COUNT']}/{environ['MASTER_PORT']}",
        "port": int(environ["MASTER_PORT"]),
        "pid": os.getpid(),
        "host": os.getppid(),
    }
    path = f"{folder}/{kind}-{proof['rank']}-{os.getpid()}"
    with open(path + ".tmp", "w") as file:
        json.dump(proof, file)
    os.rename(path + ".tmp", path)


def _fail_once(folder: str) -> None:
    try:
        os.close(os.open(f"{folder}/failed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    sys.exit(CODE)


def main() -> None:
    folder, seconds = sys.argv[1], float(sys.argv[2])
    children, fails = (bool(int(text)) for text in sys.argv[3:])
    rank, pid = int(os.environ["RANK"]), os.getpid()
    _prove(folder, "begin")
    if children:
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(
            ["sleep", "1001"],
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [
        (name, stream, os.open(f"{folder}/{name}-{rank}-{pid}", flags, 0o600))
        for name, stream in (("out", sys.stdout), ("err", sys.stderr))
    ]
    steps = max(1, round(seconds / STEP))
    for step in range(steps):
        for name, stream, proofs in streams:
            for number in (2 * step, 2 * step + 1):
                print(line(name, rank, pid, number), file=stream, flush=True)
                os.write(proofs, b"%d\n" % number)
        if fails and rank == 0 and step == min(steps // 2, FAILS_WITHIN):
            _fail_once(folder)
        time.sleep(STEP)
    _prove(folder, "end")
    time.sleep(ENDING)


if __name__ == "__main__":
    main()
