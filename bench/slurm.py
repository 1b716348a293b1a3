# SPDX-License-Identifier: BSD-3-Clause
"""From submission to running on an idle Slurm, beside a bare sbatch: ``python bench/slurm.py [--rounds N]``.

A cluster of our own, each node a namespace of this machine, comes up first; all of its daemons and all four tasks share
this machine's processors, so whatever a task does at its start is done four times. The variants, in alternating order,
each on idle nodes:

    bare    ``sbatch`` of a script with one line, ``srun env PYTHON begun.py``, with the same nodes, CPUs and memory
    ours    the same command as a role of an app, by a ``Runner`` that is there already, as ``sbatch`` is (with ``env``,
            for a role whose program is Python's runs on Monarch hosts)
    hosts   a torchrun role by the same Runner, on Monarch hosts

What the columns say, in seconds from the call that submits, medians with least and greatest:

    submitted  until that call has returned
    running    until the last task runs: the first line of begun.py; of ``hosts``, the start of the host process
    x bare     the median of running divided by the bare jobs'. (Not ratios within a round: the scheduler looks at the
               queue at times of its own, so every job waits for a random part of a second.)

``--state`` has Slurm asked every 20 ms and adds the column RUNNING: until it first says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from words import spread

# The cluster is that of the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from torchx.runner import Runner
from torchx.specs import AppDef, Resource, Role

from tests.clusters.slurm.cluster import SlurmCluster, missing
from torchx_monarch.backends.slurm.backend import SlurmBackend
from torchx_monarch.schedulers import monarch_slurm

NODES = 4
MEMORY = 1024
TIMEOUT = 60.0
NAME = "monarch_slurm"

BEGUN = """
import time
first = time.time()
import os, sys
path = os.path.join(sys.argv[1], os.environ["SLURM_PROCID"])
with open(path + ".new", "w") as file:
    file.write(str(first))
os.rename(path + ".new", path)
while not os.path.exists(os.path.join(sys.argv[1], "end")):
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Sample:
    """One job; seconds since the call that submitted it. ``state``: until Slurm said RUNNING, if it was asked."""

    submitted: float
    running: float
    state: float | None = None


class Bench:
    """Submits to one cluster, and waits until it is idle again.

    Args:
        cluster: it.
        scratch: for the programs and what they write.
        ask: whether Slurm is asked for the state.
    """

    def __init__(self, cluster: SlurmCluster, scratch: Path, ask: bool) -> None:
        self._cluster = cluster
        self._scratch = scratch
        self._ask = ask
        self._program = scratch / "begun.py"
        self._program.write_text(BEGUN)
        self._runner = Runner("torchx", {NAME: monarch_slurm})
        self._count = 0

    def measure(self, variant: str) -> Sample:
        """One job of a variant."""
        self._wait("idle nodes", self._is_idle)
        self._count += 1
        out = self._scratch / str(self._count)
        out.mkdir()
        started = time.time()
        job_id = self._bare(out) if variant == "bare" else self._ours(out, hosts=variant == "hosts")
        submitted = time.time()
        state = self._state(job_id) if self._ask else None

        def begun() -> list[float]:
            return self._hosts(job_id) if variant == "hosts" else self._begun(out)

        self._wait("the tasks", lambda: len(begun()) == NODES)
        times = begun()
        (out / "end").touch()
        if variant == "hosts":
            self._runner.cancel(f"{NAME}://torchx/{job_id}")
        return Sample(submitted - started, max(times) - started, state and state - started)

    def _bare(self, out: Path) -> str:
        script = out / "job.sh"
        script.write_text(
            f"#!/bin/sh\nexec srun --nodes={NODES} --ntasks={NODES} --ntasks-per-node=1 --cpus-per-task=1 "
            f"--mem={MEMORY} {' '.join(self._command(out))}\n"
        )
        shape = [f"--nodes={NODES}", "--ntasks-per-node=1", "--cpus-per-task=1", f"--mem={MEMORY}"]
        return self._cluster.run("sbatch", "--parsable", f"--output={out}/log", *shape, str(script)).strip()

    def _command(self, out: Path) -> list[str]:
        return ["env", sys.executable, str(self._program), str(out)]

    def _ours(self, out: Path, hosts: bool) -> str:
        ranks = ["torchrun", "--nnodes", str(NODES), "--nproc-per-node", "1", str(self._program), str(out)]
        command = ranks if hosts else self._command(out)
        role = Role("r", "", entrypoint=command[0], args=command[1:], num_replicas=NODES)
        role.resource = Resource(cpu=1, gpu=0, memMB=MEMORY)
        cfg = {"preload": "none", "grace": 5}
        handle: str = self._runner.run(AppDef("bench", [role]), NAME, cfg=cfg)
        return handle.rpartition("/")[2]

    def _begun(self, out: Path) -> list[float]:
        return [float(path.read_text()) for path in out.iterdir() if path.name.isdigit()]

    def _hosts(self, job_id: str) -> list[float]:
        folder = SlurmBackend().folder(job_id)
        assert folder is not None
        records = [folder.replica("r", k).load_record() for k in range(NODES)]
        return [record.started for record in records if record is not None and record.started is not None]

    def _state(self, job_id: str) -> float:
        ask = ("squeue", "--noheader", "--format=%T", f"--jobs={job_id}")
        self._wait("RUNNING", lambda: self._cluster.run(*ask).strip() == "RUNNING", every=0.02)
        return time.time()

    def _is_idle(self) -> bool:
        # A node may be called idle while a job on it is being cancelled.
        if self._cluster.run("squeue", "--noheader").strip():
            return False
        return len(self._cluster.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split()) == NODES

    def _wait(self, what: str, condition: Callable[[], bool], every: float = 0.05) -> None:
        until = time.monotonic() + TIMEOUT
        while not condition():
            if time.monotonic() > until:
                sys.exit(f"bench/slurm.py: still waiting for {what} after {TIMEOUT:g} s")
            time.sleep(every)

    def close(self) -> None:
        """Release what the Runner holds."""
        self._runner.close()


def report(samples: dict[str, list[Sample]], ask: bool) -> str:
    rows = [["", "submitted", "running", "x bare", *(["RUNNING"] if ask else [])]]
    for variant, taken in samples.items():
        medians = [statistics.median(timing.running for timing in measured) for measured in (taken, samples["bare"])]
        row = [variant, spread([timing.submitted for timing in taken]), spread([timing.running for timing in taken])]
        row.append(f"{medians[0] / medians[1]:.2f}")
        rows.append([*row, *([spread([timing.state or 0.0 for timing in taken])] if ask else [])])
    return "\n".join("  ".join(cell.ljust(18) for cell in row).rstrip() for row in rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="jobs of each variant (default: 25)")
    parser.add_argument("--variants", nargs="+", choices=("ours", "hosts"), default=["ours", "hosts"])
    parser.add_argument("--state", action="store_true", help="ask Slurm for the state meanwhile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    return parser.parse_args()


def run(args: argparse.Namespace, cluster: SlurmCluster, scratch: Path) -> dict[str, list[Sample]]:
    os.environ["SLURM_CONF"] = str(cluster.conf)
    os.environ["MONARCH_STATE_DIR"] = str(scratch / "state")
    bench = Bench(cluster, scratch, args.state)
    variants = ["bare", *args.variants]
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    for number in range(-1, args.rounds):  # round -1 fills the page cache and is not counted
        turn = number % len(variants)
        for name in variants[turn:] + variants[:turn]:
            sample = bench.measure(name)
            if number >= 0:
                samples[name].append(sample)
    bench.close()
    return samples


def main() -> int:
    args = parse_args()
    if args.rounds < 1:
        sys.exit(f"--rounds must be 1 or more, not {args.rounds}")
    if reason := missing():
        sys.exit(f"bench/slurm.py: {reason}")
    cluster = SlurmCluster(NODES)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            samples = run(args, cluster.up(), Path(folder))
    finally:
        cluster.down()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}, {args.rounds} rounds\n{report(samples, args.state)}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({name: [asdict(s) for s in taken] for name, taken in samples.items()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
