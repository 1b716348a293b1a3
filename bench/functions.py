# SPDX-License-Identifier: BSD-3-Clause
"""A function on 4 ranks, beside torchrunx and submitit: ``python bench/functions.py --peers FOLDER``.

FOLDER is what ``pip install --target FOLDER torchrunx==0.4.0 submitit==1.5.4`` has made. Each round is a new process,
which imports the library and calls a function (Gloo group, one all-reduce) four times on this machine:

cold        from the start of the process to the values of the first call: seconds
again       the second call: seconds
exception   a call in which rank 2 raises and the others return, to the exception in the caller: seconds
waiting     the same while the others wait for rank 2 in the all-reduce; 20 s are the limit here

``kept`` is ``SPMDJob.run`` on one allocation, ``run`` is ``torchx_monarch.run``, with new hosts for each call. The
variants alternate; medians with the least and the greatest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from words import spread

COMMON = """
import json, signal, sys, time

began = float(sys.argv[1])

def train(fails):
    import torch
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    if fails and rank == 2:
        raise ArithmeticError("loss is nan")
    if fails == "exception":
        return rank, 0.0
    total = torch.ones(1)
    dist.all_reduce(total)
    return rank, total.item()

def measure(call):
    expected = [(rank, 4.0) for rank in range(4)]
    assert call("") == expected
    times, types = [time.time() - began], []
    start = time.time()
    assert call("") == expected
    times.append(time.time() - start)
    for how in ("exception", "waiting"):
        start = time.time()
        signal.alarm(20)
        try:
            call(how)
        except Exception as error:
            times.append(time.time() - start)
            types.append(type(error).__name__)
        signal.alarm(0)
    print(json.dumps({"times": times, "types": types}), flush=True)

def give_up(*_):
    raise TimeoutError

signal.signal(signal.SIGALRM, give_up)
"""

VARIANTS = {
    "kept": """
import torchx_monarch
options = torchx_monarch.RunOptions(output="none")
with torchx_monarch.serve("torchrun --nproc-per-node 4 train.py") as job:
    measure(lambda fails: job.run(train, fails, options=options))
""",
    "run": """
import torchx_monarch
options = torchx_monarch.RunOptions(output="none")
measure(lambda fails: torchx_monarch.run(train, fails, nproc=4, options=options))
""",
    "torchrunx": """
import torchrunx
launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=4, backend="gloo")
launcher.set_logging_handlers(None)
if __name__ == "__main__":
    measure(lambda fails: launcher.run(train, fails).results["localhost"])
""",
    "submitit": """
import submitit
executor = submitit.LocalExecutor("submitit")
executor.update_parameters(tasks_per_node=4, timeout_min=5)

def joined(fails):
    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return train(fails)

measure(lambda fails: executor.submit(joined, fails).results())
""",
}


def measured(variant: str, folder: str, peers: str) -> tuple[list[float], list[str]]:
    """Return the seconds of the calls, and the types of the exceptions."""
    program = Path(folder, f"with_{variant}.py")
    program.write_text(COMMON + VARIANTS[variant])
    env = {**os.environ, "MONARCH_STATE_DIR": f"{folder}/state"}
    if variant in ("torchrunx", "submitit"):
        env["PYTHONPATH"] = peers
    command = [sys.executable, str(program), str(time.time())]
    with open(f"{folder}/out", "w+") as out:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(120)
        finally:  # torchrunx leaves processes behind when it is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        said = out.read()
    found = [line for line in said.splitlines() if line.startswith('{"times"')]
    if code or not found:
        raise SystemExit(f"{variant}: {said}")
    result = json.loads(found[-1])
    return result["times"], result["types"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each variant (default: 5)")
    parser.add_argument("--peers", required=True, help="folder with torchrunx and submitit")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    times: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    types = dict[str, list[str]]()
    with tempfile.TemporaryDirectory(prefix="bf") as folder:
        for _ in range(args.rounds):
            for variant in VARIANTS:
                seconds, types[variant] = measured(variant, folder, os.path.abspath(args.peers))
                times[variant].append(seconds)
        time.sleep(3)  # the last hosts end, whose state is in the folder
    for variant, rounds in times.items():
        columns = "  ".join(f"{spread(column):>20}" for column in zip(*rounds, strict=True))
        print(f"{variant:>9}  {columns}  {', '.join(types[variant])}")
    if args.json:
        args.json.write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
