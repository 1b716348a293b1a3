# SPDX-License-Identifier: BSD-3-Clause
"""What mutual TLS costs the start of a job: ``python bench/tls.py [--rounds N] [--nproc N ...] [--json FILE]``.

Two host processes on this machine, once over socket files (``ipc://``, as ``monarch_local`` does) and once over TLS on
the loopback, in alternating order; the ranks import nothing ahead. What the columns say, in seconds from the start of
the host processes:

    user code    until the first line of the last rank's program: median, least and greatest
    hosts        until replica 0 has said that all are there
    total        until both host processes have ended
    difference   of TLS to ipc in user code: the median of the differences within a round, least and greatest
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from words import spread

from torchx_monarch.transport import credentials

PROGRAM = """
import time
first = time.time()
import os, sys
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(str(first))
"""

VARIANTS = ("ipc", "tls")
TIMEOUT = 60.0


@dataclasses.dataclass(frozen=True)
class Sample:
    """One job; seconds since its start."""

    hosts: float
    user_code: float
    total: float


def environment(variant: str, folder: Path) -> dict[str, str]:
    """What a backend says to the host processes."""
    found = {
        **os.environ,
        "MONARCH_RUN_DIR": str(folder),
        "MONARCH_EVENTS": str(folder / "events"),
        "MONARCH_LOG_DIR": str(folder / "logs"),
    }
    if variant == "ipc":
        return {**found, "MONARCH_RENDEZVOUS": f"unix:{folder}/r.sock"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts, _ = credentials.create()
    return {**found, "MONARCH_RENDEZVOUS": f"tls:127.0.0.1:{port}", "MONARCH_CREDENTIALS": hosts.to_text()}


def once(variant: str, nproc: int) -> Sample:
    """Run one job of two hosts with ``nproc`` ranks each."""
    with tempfile.TemporaryDirectory(prefix="b") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "ranks").mkdir()
        env = environment(variant, folder)
        words = ["torchrun", "--nnodes", "2", "--nproc-per-node", str(nproc), str(folder / "program.py")]
        options = ["--app", "bench", "--role", "bench", "--replicas", "2", "--preload", "", "--grace", "5"]
        command = [sys.executable, "-m", "torchx_monarch.host", *options]
        with open(folder / "output", "wb") as output:
            started = time.time()
            processes = [
                subprocess.Popen(
                    [*command, "--replica", str(replica), "--", *words, str(folder / "ranks")],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
                for replica in range(2)
            ]
        try:
            codes = [process.wait(TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
        total = time.time() - started
        first = [float(path.read_text()) for path in (folder / "ranks").iterdir()]
        if codes != [0, 0] or len(first) != 2 * nproc:
            sys.exit(f"bench/tls.py: {variant}: exit codes {codes}\n{(folder / 'output').read_text()[-3000:]}")
        events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
        when = {event["kind"]: event["time"] - started for event in events}
        return Sample(when["hosts"], max(first) - started, total)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="jobs of each variant (default: 9)")
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2], help="ranks per host (default: 1 2)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}; two host processes, {args.rounds} rounds")
    print(f"{'ranks':>5}  {'':3}  {'hosts':>5}  {'user code':>19}  {'total':>19}")
    everything = {}
    for nproc in args.nproc:
        samples: dict[str, list[Sample]] = {variant: [] for variant in VARIANTS}
        for number in range(-1, args.rounds):  # round -1 fills the page cache and is not counted
            for variant in VARIANTS if number % 2 else reversed(VARIANTS):
                sample = once(variant, nproc)
                if number >= 0:
                    samples[variant].append(sample)
        for variant, taken in samples.items():
            hosts = statistics.median(sample.hosts for sample in taken)
            times = spread([timing.user_code for timing in taken]), spread([timing.total for timing in taken])
            print(f"{2 * nproc:>5}  {variant}  {hosts:>5.2f}  {times[0]:>19}  {times[1]:>19}")
        pairs = zip(samples["tls"], samples["ipc"], strict=True)
        print(f"difference: {spread([tls.user_code - ipc.user_code for tls, ipc in pairs])}", flush=True)
        everything[nproc] = {
            variant: [dataclasses.asdict(timing) for timing in taken] for variant, taken in samples.items()
        }
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
