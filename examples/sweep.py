# SPDX-License-Identifier: BSD-3-Clause
"""A sweep with TorchX's Runner: a job for each learning rate, and a table of what each of them reached::

    python examples/sweep.py                  # two jobs at a time (slots=1 of 2), each with hosts of its own
    python examples/sweep.py --on-allocation  # one after the other on hosts that stay, with torch imported

The jobs train ``examples/digits.py``. Each is an ordinary job, with status, logs and an exit code, in both cases.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

from torchx.runner import Runner, get_runner
from torchx.specs import AppState, CfgVal

SCRIPT = Path(__file__).parent / "digits.py"
RATES = ("0.0002", "0.0005", "0.001", "0.002", "0.003", "0.005", "0.008", "0.01", "0.02", "0.03", "0.05", "0.1")


def submit(runner: Runner, rate: str, cfg: dict[str, CfgVal], folder: str, epochs: int) -> str:
    """Submit the job of one learning rate, and return its handle."""
    program = [str(SCRIPT), "--lr", rate, "--epochs", str(epochs), "--checkpoint-dir", os.path.join(folder, rate)]
    component = ["-j", "1x2", "--name", f"lr-{rate}", *program]
    return str(runner.run_component("monarch.spmd", component, "monarch_local", cfg=cfg))


def reached(runner: Runner, handle: str) -> str:
    """Return the last accuracy that a job has printed."""
    lines = list(runner.log_lines(handle, "digits"))
    found = [match[1] for line in lines if (match := re.search(r"accuracy (\d+\.\d+%)", line))]
    return found[-1] if found else "none"


def main() -> None:
    """Submit the jobs, wait for all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on-allocation", action="store_true", help="run the jobs on the hosts of one allocation")
    parser.add_argument("--rates", default=",".join(RATES), help="learning rates, separated by commas")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    with get_runner() as runner, tempfile.TemporaryDirectory() as folder:
        allocation, cfg = "", dict[str, CfgVal](slots=1)
        if args.on_allocation:
            allocation = str(runner.run_component("monarch.hosts", ["-j", "1x2"], "monarch_local"))
            cfg = {"on": allocation}
        begun, failed = time.monotonic(), 0
        handles = {rate: submit(runner, rate, cfg, folder, args.epochs) for rate in args.rates.split(",")}
        for rate, handle in handles.items():
            status = runner.wait(handle, wait_interval=0.1)
            state = status.state if status is not None else AppState.UNKNOWN
            failed += state is not AppState.SUCCEEDED
            print(f"lr {rate:6} {state.name:10} accuracy {reached(runner, handle):8} {handle}", flush=True)
        print(f"{len(handles)} jobs in {time.monotonic() - begun:.1f} s")
        if allocation:
            runner.cancel(allocation)
    if failed:
        raise SystemExit(f"{failed} jobs have not succeeded")


if __name__ == "__main__":
    main()
