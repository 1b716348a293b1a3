# SPDX-License-Identifier: BSD-3-Clause
"""Launch times beside our peers, measured together in one run: ``python bench/launch.py [--rounds N] [--json FILE]``.

Every variant runs the same program (train_min.py: import torch, form a Gloo group, one all_reduce, exit) and is timed
from the start of its process to its end. In each round every variant runs once, in an order that changes from round to
round, so that a slow moment of the machine falls on all alike; ratios are taken within a round. What the columns say:

    total        start of the command to its end: median, least and greatest, in seconds
    user code    start of the command to the first line of the last rank's own code: median (a rank of ours has imported
                 torch by then, the others have that before them)
    group        start of the command to the formed process group: median
    CPU          user and system time of all processes of the launch: median, in seconds
    x hand       total divided by that of the same round's ranks started by hand: median (least-greatest)
    x torchrun   the same against torchrun
    CPU x torchrun  the CPU time, divided by torchrun's of the same round

Then, for ours, from the end of the last rank to the moment a Runner that polls every 0.05 s sees SUCCEEDED (beside it:
what the rank's interpreter needs to go away after its last line, measured on the ranks started by hand); what the
launcher's own processes use while the ranks sleep, each by itself; and the memory (PSS) of the ranks themselves, to
which the interpreter counts that they are forks of; both with the ratio to torchrun's. A client of ours that waits is
left out, since no job needs one. ``--rounds 0`` measures memory only.

Exits with 1, after cleaning up, when any variant fails or ours leaves a process behind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from torchx_monarch.system.processes import become_subreaper

HERE = Path(__file__).resolve().parent
SCRIPT = str(HERE / "train_min.py")
BIN = Path(sys.executable).parent
MARK = "BENCH_LAUNCH_RUN"
TIMEOUT = 120.0


class BenchError(Exception):
    """A variant did not do what it is measured for; the message is for the person at the screen."""


@dataclass(frozen=True)
class Variant:
    """One way to launch. `commands` gives the processes to start, each with what it needs on top of the environment."""

    name: str
    title: str
    commands: Callable[[int, Path, list[str]], list[tuple[list[str], dict[str, str]]]]
    ours: bool = False


@dataclass
class Sample:
    """One launch; all in seconds."""

    total: float
    user_code: float
    group: float
    exit_to_end: float
    cpu: float = 0.0
    exit_to_seen: float | None = None
    submit: float | None = None


@dataclass
class Usage:
    """What one process uses: CPU in percent of one core, memory in MiB."""

    command: str
    cpu: float
    rss: float
    pss: float


@dataclass
class Idle:
    """What a launcher's own processes use while its ranks sleep, in all and one by one; units as in Usage.

    `ranks_pss` is the memory of the ranks and of the interpreter that they are forks of.
    """

    variant: str
    nproc: int
    seconds: float
    cpu: float
    rss: float
    pss: float
    ranks_pss: float
    processes: list[Usage]


# --- the variants


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def by_hand(nproc: int, out: Path, args: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    command = [sys.executable, SCRIPT, "--out", str(out), *args]
    return [(command, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(nproc)]


def torchrun(nproc: int, out: Path, args: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    return [
        ([str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={nproc}", SCRIPT, "--out", str(out), *args], {})
    ]


def torchx_local_cwd(nproc: int, out: Path, args: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    component = ["dist.torchrun", "-j", f"1x{nproc}", "--script", SCRIPT, "--", "--out", str(out), *args]
    return [([str(BIN / "torchx"), "run", "-s", "local_cwd", *component], {})]


def monarch_serve(nproc: int, out: Path, args: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    # Its ranks are actors and would start as many threads as the machine has cores each, unlike all others here.
    command = [sys.executable, str(HERE / "serve.py"), str(nproc), SCRIPT, "--out", str(out), *args]
    return [(command, {"OMP_NUM_THREADS": "1"})]


def ours_runner(nproc: int, out: Path, args: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    script = [SCRIPT, "--out", str(out), *args]
    return [([sys.executable, str(HERE / "submit.py"), str(nproc), str(out), *script], {})]


def ours_cli(nproc: int, out: Path, args: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    component = ["monarch.spmd", "--nproc", str(nproc), "--name", "bench", SCRIPT, "--out", str(out), *args]
    return [([str(BIN / "torchx"), "run", "-s", "monarch_local", "--wait", *component], {})]


HAND, TORCHRUN, OURS = "hand", "torchrun", "ours"
VARIANTS = {
    v.name: v
    for v in (
        Variant(HAND, "ranks started by hand", by_hand),
        Variant(TORCHRUN, "torchrun --standalone", torchrun),
        Variant("torchx", "torchx run -s local_cwd dist.torchrun", torchx_local_cwd),
        Variant("monarch", "monarch.job.spmd serve + run_spmd", monarch_serve),
        Variant(OURS, "monarch_local through a Runner", ours_runner, ours=True),
        Variant("ours-cli", "torchx run -s monarch_local --wait", ours_cli, ours=True),
    )
}


# --- one launch


class Launch:
    """The processes of one variant, in a folder of their own; everything they leave is found by a mark and ended."""

    def __init__(self, variant: Variant, nproc: int, scratch: Path, args: Sequence[str] = ()) -> None:
        self.variant, self.nproc = variant, nproc
        self.out = Path(tempfile.mkdtemp(dir=scratch, prefix=f"{variant.name}-"))
        self.mark = uuid.uuid4().hex
        env = os.environ | {MARK: self.mark, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        env |= {"MONARCH_STATE_DIR": str(scratch / "state"), "TMPDIR": str(scratch)}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
            env.pop(name, None)
        commands = variant.commands(nproc, self.out, list(args))
        self.output = self.out / "output.log"
        with self.output.open("wb") as log:
            self.started = time.time()
            self.processes = [
                subprocess.Popen(c, env=env | e, cwd=self.out, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                for c, e in commands
            ]

    def fail(self, why: str) -> BenchError:
        text = self.output.read_text(errors="replace")
        return BenchError(f"{self.variant.title}, nproc {self.nproc}: {why}. The end of its output:\n{text[-3000:]}")

    def wait(self) -> float:
        """Seconds from the start to the end of the last process. Raises BenchError unless all ended with 0 in time."""
        for process in self.processes:
            try:
                process.wait(max(0.0, self.started + TIMEOUT - time.time()))
            except subprocess.TimeoutExpired:
                raise self.fail(f"did not end within {TIMEOUT:.0f} s") from None
        ended = time.time()
        codes = [p.returncode for p in self.processes]
        if any(codes):
            raise self.fail(f"exit codes {codes}")
        return ended - self.started

    def ranks(self) -> list[dict[str, float]]:
        """What each rank wrote. Raises BenchError when one is missing: then something else was measured."""
        try:
            return [json.loads((self.out / f"{rank}.json").read_text()) for rank in range(self.nproc)]
        except (OSError, ValueError) as e:
            raise self.fail(f"a rank did not finish ({e})") from None

    def wait_asleep(self) -> list[int]:
        """The pids of the ranks, once all of them sleep."""
        files = [self.out / f"{rank}.pid" for rank in range(self.nproc)]
        while not all(f.exists() and f.read_text() for f in files):
            if time.time() > self.started + TIMEOUT:
                raise self.fail("the ranks did not get as far as their sleep")
            if all(p.poll() is not None for p in self.processes):
                raise self.fail("ended before the ranks slept")
            time.sleep(0.02)
        return [int(f.read_text()) for f in files]

    def marked(self) -> list[psutil.Process]:
        """The live processes of this launch, wherever they have moved to: the environment is inherited by all."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def finish(self, grace: float = 3.0) -> list[str]:
        """Ends whatever is left `grace` seconds after the command has ended; the command lines of what had to be."""
        deadline = time.monotonic() + grace
        while (left := self.marked()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = [describe(p) for p in left]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, 5)
        for started in self.processes:
            started.wait()
        return names


def describe(process: psutil.Process) -> str:
    try:
        words = [Path(w).name if w.startswith("/") else w for w in process.cmdline()]
    except psutil.Error:
        words = []
    return " ".join(words)[:100] or f"pid {process.pid}"


def measure(variant: Variant, nproc: int, scratch: Path, leftovers: dict[str, list[str]]) -> Sample:
    before = cpu_of_ended()
    launch = Launch(variant, nproc, scratch)
    try:
        total = launch.wait()
        ranks = launch.ranks()
        last = max(r["end"] for r in ranks) - launch.started
        sample = Sample(
            total=total,
            user_code=max(r["first_line"] for r in ranks) - launch.started,
            group=max(r["group"] for r in ranks) - launch.started,
            exit_to_end=total - last,
        )
        submitted = launch.out / "submit.json"
        if submitted.exists():
            seen = json.loads(submitted.read_text())
            sample.exit_to_seen = seen["seen"] - launch.started - last
            sample.submit = seen["submitted"] - launch.started
    except BaseException:
        launch.finish(grace=0)
        raise
    if names := launch.finish():
        leftovers.setdefault(variant.name, []).extend(names)
    sample.cpu = cpu_of_ended() - before
    return sample


def cpu_of_ended() -> float:
    """CPU seconds of all processes that have ended below this one, which is the subreaper of detached ones."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_idle(variant: Variant, nproc: int, scratch: Path, seconds: float) -> Idle:
    """Uses the process tree: everything of the launch but the ranks (and what a rank itself has started)."""
    launch = Launch(variant, nproc, scratch, ["--sleep", str(seconds + 6)])
    try:
        asleep = launch.wait_asleep()
        time.sleep(2)  # what was still to be done after the start is over
        ranks = set(asleep)
        for pid in asleep:
            ranks |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        client = {p.pid for p in launch.processes} if variant.ours else set()
        processes = tree(launch)
        ranks |= {p.pid for p in processes if "torchx-monarch zygote" in describe(p)}
        own = [p for p in processes if p.pid not in ranks | client]
        before = {p.pid: sum(p.cpu_times()[:2]) for p in own}
        start = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - start
        rows = []
        for process in own:
            memory = process.memory_full_info()
            cpu = 100 * (sum(process.cpu_times()[:2]) - before[process.pid]) / elapsed
            rows.append(Usage(describe(process), cpu, memory.rss / 2**20, memory.pss / 2**20))
        ranks_pss = sum(psutil.Process(pid).memory_full_info().pss for pid in ranks) / 2**20
        launch.wait()
    finally:
        launch.finish(grace=3)
    cpu, rss, pss = (sum(getattr(row, name) for row in rows) for name in ("cpu", "rss", "pss"))
    return Idle(variant.name, nproc, elapsed, cpu, rss, pss, ranks_pss, rows)


def tree(launch: Launch) -> list[psutil.Process]:
    """The launch's processes and all that descend from them."""
    found = {p.pid: p for p in launch.marked()}
    for process in list(found.values()):
        for child in process.children(recursive=True):
            found.setdefault(child.pid, child)
    return list(found.values())


# --- the report


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(samples: dict[str, list[Sample]]) -> dict[str, dict[str, Any]]:
    """Per variant: spreads of the times and of the ratios taken round by round."""
    result: dict[str, dict[str, Any]] = {}
    for name, taken in samples.items():
        row: dict[str, Any] = {}
        for column in ("total", "user_code", "group", "exit_to_end", "cpu", "exit_to_seen", "submit"):
            values = [v for s in taken if (v := getattr(s, column)) is not None]
            if values:
                row[column] = spread(values)
        for base in (HAND, TORCHRUN):
            if base in samples:
                row[f"x_{base}"] = spread([s.total / b.total for s, b in zip(taken, samples[base], strict=True)])
                row[f"cpu_x_{base}"] = spread([s.cpu / b.cpu for s, b in zip(taken, samples[base], strict=True)])
        result[name] = row
    return result


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def report(nproc: int, summary: dict[str, dict[str, Any]]) -> str:
    def ratio(row: dict[str, Any], key: str) -> str:
        s = row.get(key)
        return f"{s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f})" if s else "-"

    columns = ["total", "(least-greatest)", "user code", "group", "x hand", "x torchrun", "CPU", "CPU x torchrun"]
    rows = [[f"nproc {nproc}", *columns]]
    for name, row in summary.items():
        total = row["total"]
        rows.append(
            [
                VARIANTS[name].title,
                f"{total['median']:.2f}",
                f"({total['min']:.2f}-{total['max']:.2f})",
                f"{row['user_code']['median']:.2f}",
                f"{row['group']['median']:.2f}",
                ratio(row, "x_hand"),
                ratio(row, "x_torchrun"),
                f"{row['cpu']['median']:.2f}",
                ratio(row, "cpu_x_torchrun"),
            ]
        )
    text = table(rows)
    if OURS in summary and (seen := summary[OURS].get("exit_to_seen")):
        text += f"\nours, end of the last rank to SUCCEEDED seen: {seen['median']:.2f} s (most {seen['max']:.2f})"
        if HAND in summary:
            gone = summary[HAND]["exit_to_end"]
            text += f"; of it the interpreter's own end, as by hand: {gone['median']:.2f} s"
    return text


def report_idle(idle: Sequence[Idle]) -> str:
    columns = ["nproc", "CPU % of a core", "RSS MiB", "PSS MiB", "x torchrun", "processes", "ranks' PSS", "x torchrun"]
    rows = [["beside sleeping ranks", *columns]]
    peers = {i.nproc: i for i in idle if i.variant == TORCHRUN}
    for i in idle:
        peer = peers.get(i.nproc)
        use = [f"{i.cpu:.2f}", f"{i.rss:.0f}", f"{i.pss:.0f}", f"{i.pss / peer.pss:.2f}" if peer else "-"]
        ranks = [f"{i.ranks_pss:.0f}", f"{i.ranks_pss / peer.ranks_pss:.2f}" if peer else "-"]
        rows.append([VARIANTS[i.variant].title, str(i.nproc), *use, str(len(i.processes)), *ranks])
        for p in i.processes:
            rows.append([f"  {p.command[:60]}", "", f"{p.cpu:.2f}", f"{p.rss:.0f}", f"{p.pss:.0f}", "", "", "", ""])
    return table(rows)


def machine() -> dict[str, Any]:
    names = ("torch", "torchx-nightly", "torchmonarch", "torchx-monarch")
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_at_start": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="launches of each variant; 0: idling only (default: 7)")
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4, 8], help="ranks per launch (default: 2 4 8)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument(
        "--idle", type=float, default=10.0, metavar="S", help="seconds of idling; 0: none (default: 10)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    return parser.parse_args()


def run(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    about = machine()
    print(f"{about['cpus']} CPUs, load {about['load_at_start']:.2f}, Python {about['python']}, {about['versions']}")
    result: dict[str, Any] = {"machine": about, "rounds": args.rounds, "launches": {}, "idle": [], "leftovers": {}}
    variants = [VARIANTS[name] for name in args.variants]
    leftovers: dict[str, list[str]] = result["leftovers"]
    for nproc in args.nproc if args.rounds else ():
        samples: dict[str, list[Sample]] = {v.name: [] for v in variants}
        for number in range(-1, args.rounds):  # round -1 fills the page cache and is not counted
            turn = number % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                sample = measure(variant, nproc, scratch, leftovers)
                if number >= 0:
                    samples[variant.name].append(sample)
                if sys.stderr.isatty():
                    done = f"nproc {nproc}, round {number + 1} of {args.rounds}: {variant.name}"
                    print(f"\r{done:<50}", end="", file=sys.stderr, flush=True)
        summary = summarize(samples)
        raw = {name: [asdict(s) for s in taken] for name, taken in samples.items()}
        result["launches"][str(nproc)] = {"summary": summary, "samples": raw}
        print(f"\n{report(nproc, summary)}", flush=True)
    if args.idle:
        shown = [v for v in variants if v.name in (TORCHRUN, OURS)]
        idle = [measure_idle(v, nproc, scratch, args.idle) for nproc in args.nproc for v in shown]
        result["idle"] = [asdict(i) for i in idle]
        print(f"\n{report_idle(idle)}" if idle else "")
    return result


def main() -> int:
    args = parse_args()
    if args.rounds < 0:
        sys.exit(f"--rounds must be 0 or more, not {args.rounds}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the cleaning up is done
    become_subreaper()
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        result = run(args, scratch)
    except BenchError as e:
        print(f"\nbench/launch.py: {e}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = False
    for name, commands in result["leftovers"].items():
        print(f"left running by {VARIANTS[name].title} (ended by the benchmark): {sorted(set(commands))}")
        failed |= VARIANTS[name].ours
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
