# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of several hosts, all on this machine, beside torchrun with as many agents: ``python bench/hosts.py``.

launch      start of the command (``torchx run -s monarch_local --wait``; the agents of ``torchrun --nnodes N``, which
            meet by c10d) to its end, for train_min.py (import torch, a Gloo group, one all_reduce): seconds
memory      PSS of the process of a host, or of an agent, beside ranks that sleep: MB
CPU         user and system time of that process until its ranks run, without its zygote and its ranks: seconds
next        from the SIGKILL of one of two hosts, with its rank, to the first line of the next attempt, with a spare:
            seconds. torchrun has no such attempt: with a third agent and ranks that wait, it goes on waiting

The variants alternate; medians with the least and the greatest, ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
from words import spread

BIN = Path(sys.executable).parent
MARK = "BENCH_HOSTS"
TRAIN = str(Path(__file__).with_name("train_min.py"))
WITHIN = 120.0

SLEEPS = """
import os, sys, time
with open(os.path.join(sys.argv[1], f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"), "w") as file:
    file.write(f"{time.time()} {os.getpid()}")
while not os.path.exists(os.path.join(sys.argv[1], "go")):
    time.sleep(0.01)
"""


class Job:
    """A job of one variant; a context manager that ends all its processes.

    Args:
        ours: whether it is a job of monarch_local; else one of torchrun.
        shape: hosts, spare hosts and ranks per host.
        words: the program and its arguments.
    """

    def __init__(self, ours: bool, shape: tuple[int, int, int], words: list[str]) -> None:
        self.ours = ours
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="bh")
        hosts, spares, nproc = shape
        scratch = self._folder.name
        env = os.environ | {MARK: self._mark, "MONARCH_STATE_DIR": f"{scratch}/state", "TMPDIR": scratch}
        self.began = time.time()
        if ours:
            size = f"{hosts}+{spares}x{nproc}" if spares else f"{hosts}x{nproc}"
            commands = [["torchx", "run", "-s", "monarch_local", "--wait", "monarch.spmd", "-j", size, *words]]
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                meet = f"127.0.0.1:{free.getsockname()[1]}"
            rdzv = ["--rdzv-backend", "c10d", "--rdzv-endpoint", meet, "--rdzv-id", "x", "--max-restarts", "3"]
            shown = ["--nnodes", str(hosts), "--nproc-per-node", str(nproc)]
            commands = [["torchrun", *shown, *rdzv, *words] for _ in range(hosts + spares)]
        self._processes = [
            subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for command in commands
        ]

    def wait(self) -> float:
        """Wait for success; return the seconds since the start."""
        for process in self._processes:
            assert process.wait(WITHIN) == 0, process.args
        return time.time() - self.began

    def hosts(self) -> list[psutil.Process]:
        """The processes of hosts or agents, by their age."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                of_host = "torchx_monarch.host" in words if self.ours else any(w.endswith("/torchrun") for w in words)
                if of_host and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    process.kill()
        for command in self._processes:
            command.wait(WITHIN)
        self._folder.cleanup()


@contextlib.contextmanager
def sleeping(ours: bool, shape: tuple[int, int, int], folder: Path) -> Iterator[Job]:
    """Start a job whose ranks sleep, and wait until they do."""
    (folder / "sleeps.py").write_text(SLEEPS)
    with Job(ours, shape, [str(folder / "sleeps.py"), str(folder)]) as job:
        begun(folder, 0, shape[0] * shape[2])
        yield job


def begun(folder: Path, attempt: int, ranks: int) -> float:
    """Wait until all ranks of an attempt have begun; return when the last one did."""
    until = time.monotonic() + WITHIN
    while len(found := [file for file in folder.glob(f"{attempt}-*") if file.read_text()]) < ranks:
        assert time.monotonic() < until, f"{len(found)} of {ranks} ranks of attempt {attempt} have begun"
        time.sleep(0.005)
    return max(float(file.read_text().split()[0]) for file in found)


def idle(ours: bool, hosts: int) -> tuple[float, float]:
    """Return the memory and the CPU time of a host, the means over those of one job."""
    with tempfile.TemporaryDirectory() as folder, sleeping(ours, (hosts, 0, 2), Path(folder)) as job:
        found = job.hosts()
        assert len(found) == hosts
        times = [process.cpu_times() for process in found]
        memory = [process.memory_full_info().pss / 1e6 for process in found]
        return sum(memory) / hosts, sum(time.user + time.system for time in times) / hosts


def recovery() -> float:
    """Return the seconds from the loss of a host to the next attempt."""
    with tempfile.TemporaryDirectory() as folder, sleeping(True, (2, 1, 1), Path(folder)) as job:
        time.sleep(2.0)  # the spare host is there, too
        ranks = {int(file.read_text().split()[1]) for file in Path(folder).glob("0-*")}
        members = [host for host in job.hosts() if ranks & {child.pid for child in host.children(recursive=True)}]
        lost = [members[-1], *members[-1].children(recursive=True)]
        killed = time.time()
        for process in lost:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        return begun(Path(folder), 1, 2) - killed


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--shapes", nargs="+", default=["2x2", "4x2"], help="hosts x ranks (default: 2x2 4x2)")
    parser.add_argument("--no-recovery", action="store_true", help="leave out the loss of a host")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    recovered: list[float] = []
    for _ in range(args.rounds):
        for shape in args.shapes:
            hosts, nproc = map(int, shape.split("x"))
            pair = []
            for ours in (True, False):
                with tempfile.TemporaryDirectory() as out, Job(ours, (hosts, 0, nproc), [TRAIN, "--out", out]) as job:
                    pair.append(job.wait())
            found.setdefault(f"launch {shape}", []).append((pair[0], pair[1]))
            (memory, cpu), (their_memory, their_cpu) = idle(True, hosts), idle(False, hosts)
            found.setdefault(f"memory {shape}", []).append((memory, their_memory))
            found.setdefault(f"CPU {shape}", []).append((cpu, their_cpu))
        if not args.no_recovery:
            recovered.append(recovery())
    print(f"{'':14}{'ours':24}{'torchrun':24}x torchrun")
    for name, pairs in found.items():
        columns = [spread(list(column)) for column in zip(*((a, b, a / b) for a, b in pairs), strict=True)]
        print(f"{name:14}{columns[0]:24}{columns[1]:24}{columns[2]}")
    if recovered:
        print(f"{'next':14}{spread(recovered)}")


if __name__ == "__main__":
    main()
