# SPDX-License-Identifier: BSD-3-Clause
"""Two ranks printing as fast as they can, beside ``torchrun --tee 3``: ``python bench/logs.py [--lines N]``.

Checked are the lines on the launcher's stdout and those in the ranks' files: each there exactly once, whole, in the
order of its rank. Reported are lines per second, from the launcher's start to its end; the variants alternate.

``--long MB`` instead has one rank print so much as a single line without end, and the same bytes in short lines, and
reports the CPU time and the largest memory of the host process for both.

``--follow MB`` has four ranks of a job of monarch_local print so much together, while ``torchx monarch logs -f`` reads
it, and reports the CPU time of that, how long after the job it ends, and how much the job keeps on the disk.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM = """
import os, sys
rank = os.environ["RANK"]
write = sys.stdout.write
for number in range(int(sys.argv[1])):
    write(f"{rank} {number} the quick brown fox jumps over the lazy dog\\n")
"""

COMMANDS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "ours": [sys.executable, "-m", "torchx_monarch.host", "--app", "bench", "--role", "bench", "--", "torchrun"],
}

LINE = re.compile(rb"^(\d) (\d+) the quick brown fox jumps over the lazy dog$")


BYTES = """
import os, sys
end = sys.argv[2].encode().decode("unicode_escape").encode()
piece = (b"x" * (64 - len(end)) + end) * 1024
for _ in range(int(sys.argv[1]) * 16):
    written = 0
    while written < len(piece):
        written += os.write(1, piece[written:])
"""

GOAL = 1.2
"""CPU time of the long line, in that of the short ones."""


class WrongLine(Exception):
    """A line is missing, torn or there twice."""


def check(path: Path, ranks: Sequence[int], lines: int, prefixed: bool) -> None:
    """Check the lines of some ranks in a file, each after a ``[default0]:`` if they are to be prefixed.

    Raises:
        WrongLine: naming the first line that is wrong.
    """
    expected = dict.fromkeys(ranks, 0)
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            found = LINE.match((line.partition(b"]:")[2] if prefixed else line).rstrip(b"\n"))
            if found is None or int(found[1]) not in expected:
                raise WrongLine(f"{path.name}, line {number} is torn: {line[:200]!r}")
            rank, index = int(found[1]), int(found[2])
            if index != expected[rank]:
                raise WrongLine(f"{path.name}, line {number}: rank {rank} should say {expected[rank]}: {line[:200]!r}")
            expected[rank] += 1
    if set(expected.values()) != {lines}:
        raise WrongLine(f"{path.name}: of {lines} lines each, {list(expected.values())} arrived")


def once(variant: str, lines: int) -> tuple[float, str]:
    """Lines per second, and what is wrong with the lines (empty: nothing)."""
    with tempfile.TemporaryDirectory() as folder:
        program, stdout = Path(folder, "program.py"), Path(folder, "stdout")
        program.write_text(PROGRAM)
        words = ["--nproc-per-node", "2", "--tee", "3", "--log-dir", f"{folder}/logs", str(program), str(lines)]
        started = time.monotonic()
        with open(stdout, "wb") as out:
            subprocess.run([*COMMANDS[variant], *words], stdout=out, stderr=subprocess.DEVNULL, check=True)
        seconds = time.monotonic() - started
        try:
            check(stdout, (0, 1), lines, prefixed=True)
            for rank in (0, 1):
                [path] = Path(folder, "logs").glob(f"*/attempt_0/{rank}/stdout.log")
                check(path, (rank,), lines, prefixed=False)
        except WrongLine as wrong:
            return 2 * lines / seconds, str(wrong)
        return 2 * lines / seconds, ""


def cost(megabytes: int, end: str) -> tuple[float, int]:
    """Seconds of CPU of the host process itself, and its largest resident memory in MB.

    Args:
        megabytes: printed by its rank.
        end: of each 64 bytes; empty for one line.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, stdout = Path(folder, "program.py"), Path(folder, "stdout")
        program.write_text(BYTES)
        words = [
            "--nproc-per-node",
            "1",
            "--tee",
            "3",
            "--log-dir",
            f"{folder}/logs",
            str(program),
            str(megabytes),
            end,
        ]
        with open(stdout, "wb") as out:
            host = subprocess.Popen([*COMMANDS["ours"], *words], stdout=out, stderr=subprocess.DEVNULL)
        seconds, memory = 0.0, 0
        while host.poll() is None:
            try:
                fields = Path(f"/proc/{host.pid}/stat").read_text().rpartition(")")[2].split()
                seconds = max(seconds, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
                status = Path(f"/proc/{host.pid}/status").read_text()
            except OSError:
                break
            if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                memory = max(memory, int(found[1]) // 1024)
            time.sleep(0.02)
        if host.wait() or stdout.stat().st_size < megabytes << 20:
            raise SystemExit(f"the host failed ({host.returncode}), {stdout.stat().st_size} bytes were shown")
        return seconds, memory


def long_line(megabytes: int, rounds: int) -> None:
    """Measure and print; exits with 1 when the goal is missed."""
    found: dict[str, list[tuple[float, int]]] = {"\\n": [], "": []}
    for _ in range(rounds):
        for end, costs in found.items():
            costs.append(cost(megabytes, end))
    seconds = {end: statistics.median(spent for spent, _ in costs) for end, costs in found.items()}
    for end, name in (("\\n", "short lines"), ("", "one line")):
        peak = max(memory for _, memory in found[end])
        print(f"{name:12} {megabytes} MB: {seconds[end]:6.2f} s of CPU, at most {peak} MB of memory")
    ratio = seconds[""] / seconds["\\n"]
    print(f"one line x short lines: {ratio:.2f} (goal: at most {GOAL})")
    sys.exit(1 if ratio > GOAL else 0)


def follow(megabytes: int) -> None:
    """Measure a reader that follows four ranks, and print."""
    torchx = os.path.join(os.path.dirname(sys.executable), "torchx")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MONARCH_STATE_DIR"] = folder
        program = Path(folder, "program.py")
        program.write_text(BYTES)
        words = ["-s", "monarch_local", "-cfg", "preload=none", "monarch.spmd", "--nproc", "4", str(program)]
        submitted = time.monotonic()
        subprocess.run([torchx, "run", *words, str(megabytes // 4), "\\n"], stdout=subprocess.DEVNULL, check=True)
        reader = subprocess.Popen([torchx, "monarch", "logs", "-f", "last"], stdout=subprocess.PIPE)
        waiter = subprocess.Popen([torchx, "monarch", "wait", "last"], stdout=subprocess.DEVNULL)
        assert reader.stdout is not None
        size, ended = 0, 0.0
        while piece := os.read(reader.stdout.fileno(), 1 << 20):
            size += len(piece)
            ended = ended or (time.monotonic() if waiter.poll() is not None else 0.0)
        done = time.monotonic()
        _, status, usage = os.wait4(reader.pid, 0)
        ended = ended or done
        if waiter.wait() or status or size < megabytes << 20:
            raise SystemExit(
                f"{size} bytes were read, and the commands have ended with {status} and {waiter.returncode}"
            )
        kept = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        cpu, share = usage.ru_utime + usage.ru_stime, kept / (megabytes << 20)
        print(f"the job: {ended - submitted:.1f} s; the reader ends {done - ended:.1f} s later", end="")
        print(f", {cpu:.1f} s of CPU; on disk {share:.3f} of what is printed")


def main() -> None:
    """Measure and print; exits with 1 when a line of ours was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000, help="lines of each rank (default: 1000000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default: 3)")
    parser.add_argument("--long", type=int, metavar="MB", help="measure one long line of so many MB instead")
    parser.add_argument("--follow", type=int, metavar="MB", help="measure a reader of so many MB instead")
    args = parser.parse_args()
    if args.follow:
        return follow(args.follow)
    if args.long:
        long_line(args.long, args.rounds)
    rates: dict[str, list[float]] = {variant: [] for variant in COMMANDS}
    wrong: dict[str, list[str]] = {variant: [] for variant in COMMANDS}
    for number in range(args.rounds):
        for variant in sorted(COMMANDS, reverse=number % 2 == 1):
            rate, what = once(variant, args.lines)
            rates[variant].append(rate)
            if what:
                wrong[variant].append(what)
    for variant in COMMANDS:
        got = rates[variant]
        print(f"{variant:10} {statistics.median(got):>10,.0f} lines/s ({min(got):,.0f}-{max(got):,.0f})", end="")
        print(f"  wrong in {len(wrong[variant])} of {args.rounds} runs", *wrong[variant][:1], sep="  ")
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["torchrun"], strict=True)]
    print(f"ours x torchrun: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    sys.exit(1 if wrong["ours"] else 0)


if __name__ == "__main__":
    main()
