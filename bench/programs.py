# SPDX-License-Identifier: BSD-3-Clause
"""Programs with slow imports, beside torchrun: ``python bench/programs.py [--rounds N] [--nproc N ...] [PROGRAM ...]``.

Needs transformers, lightning, accelerate and scikit-learn. Each program trains three steps of a tiny model on the CPU
and then marks the time. Measured are, in seconds, medians with the least and the greatest, and ratios of medians:

- ``launch``: the whole command, ``torchx run -s monarch_local --wait`` and ``torchrun``
- ``processor``: the processor time of a host and its ranks, and of ``torchrun`` and its ranks
- ``restart``: from just before a rank kills itself to the mark of the last rank of the next attempt
- ``again``: from ``SPMDJob.run_spmd`` on a live allocation, whose hosts have run the program before, or from the start
  of ``torchrun``, to the mark of the last rank

The variants alternate. ``--clone MODULE=FOLDER`` measures the import of an entry file as published: that of
``torchtitan.train`` in a clone of torchtitan, for one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from words import spread

from torchx_monarch import serve

PROGRAMS = {
    "minimal": """
import os, signal, sys, time
import torch
def train():
    torch.distributed.init_process_group("gloo")
    torch.distributed.all_reduce(torch.ones(1))
""",
    "digits": """
import os, signal, sys, time
import torch
from sklearn.datasets import load_digits
def train():
    torch.distributed.init_process_group("gloo")
    images = torch.tensor(load_digits().data, dtype=torch.float32)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    for _ in range(3):
        model(images).mean().backward()
""",
    "trainer": """
import os, signal, sys, time
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
def train():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
    words, labels = torch.arange(16), torch.tensor(1)
    data = [{"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}] * 64
    arguments = TrainingArguments(sys.argv[1], max_steps=3, report_to=[], save_strategy="no", use_cpu=True)
    Trainer(model=model, args=arguments, train_dataset=data).train()
""",
    "lightning": """
import os, signal, sys, time
import lightning
import torch
def train():
    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, number):
            return self.layer(batch).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)
    world = int(os.environ["LOCAL_WORLD_SIZE"])
    options = {"accelerator": "cpu", "devices": world, "max_steps": 3, "logger": False, "enable_checkpointing": False}
    lightning.Trainer(**options).fit(Line(), torch.utils.data.DataLoader(torch.rand(64, 4), 4))
""",
    "fsdp2": """
import os, signal, sys, time
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
def train():
    torch.distributed.init_process_group("gloo")
    model = fully_shard(torch.nn.Linear(64, 10))
    for _ in range(3):
        model(torch.rand(8, 64)).mean().backward()
    dcp.save(model.state_dict(), checkpoint_id=f"{sys.argv[1]}/checkpoint")
""",
    "own": """
import os, signal, sys, time
import torch
from mine import data
def train():
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    for _ in range(3):
        model(data.images()).mean().backward()
""",
    "accelerate": """
import os, signal, sys, time
import torch
from accelerate import Accelerator
def train():
    model, accelerator = torch.nn.Linear(4, 1), Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(torch.rand(64, 4), 4))
    for batch in data:
        accelerator.backward(model(batch).mean())
        optimizer.step()
""",
}

CLONE = """
import os, signal, sys, time
import torch
import {module}
def train():
    torch.distributed.init_process_group("gloo")
"""

MINE = """
import torch
from sklearn.datasets import load_digits
def images():
    return torch.tensor(load_digits().data, dtype=torch.float32)
"""
"""A module of the user's own, which the program ``own`` imports first."""

END = """
def mark(name):
    with open(f"{sys.argv[1]}/{name}", "w") as file:
        file.write(str(time.time()))
train()
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if sys.argv[2] == "restart" and attempt == "0":
    if rank == "1":
        time.sleep(1)
        mark("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
mark(f"trained-{rank}")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""

SCHEDULER = ["torchx", "run", "-s", "monarch_local", "--wait", "monarch.spmd"]
HOST = ["-m", "torchx_monarch.host", "--app", "bench", "--role", "bench", "--", "torchrun"]


class Bench:
    """Run one program on a number of ranks."""

    def __init__(self, folder: str, program: str, nproc: int) -> None:
        self._folder = folder
        self._nproc = nproc
        name, _, clone = program.partition("=")
        self._path = f"{folder}/train_{name}.py"
        Path(self._path).write_text((CLONE.format(module=name) if clone else PROGRAMS[name]) + END)
        for path in Path(clone).iterdir() if clone else ():
            Path(folder, path.name).symlink_to(path.absolute())
        Path(f"{folder}/mine").mkdir(exist_ok=True)
        Path(f"{folder}/mine/__init__.py").touch()
        Path(f"{folder}/mine/data.py").write_text(MINE)

    def measure(self, rounds: int) -> dict[str, dict[str, list[float]]]:
        """Return the seconds of each round, by what is measured and by launcher."""
        python, words = [sys.executable], ["--nproc-per-node", str(self._nproc), self._path, self._folder]
        torchrun = [*python, "-m", "torch.distributed.run"]
        restarts, launch = ["--max-restarts", "1"], ["--nproc", str(self._nproc), "--", self._path, self._folder, "x"]
        seconds: dict[str, dict[str, list[float]]] = {
            what: {"torchrun": [], "ours": []} for what in ("launch", "processor", "restart", "again")
        }
        with serve(["torchrun", *words, "again"], "monarch_local", idle_timeout=3600) as job:
            job.wait_ready(warm=True)

            def again() -> None:
                job.run_spmd(output="none")

            again()
            for _ in range(rounds):
                end = [*restarts, *words, "restart"]
                seconds["launch"]["torchrun"].append(self._command([*torchrun, *words, "x"]))
                seconds["launch"]["ours"].append(self._command([*SCHEDULER, *launch]))
                seconds["processor"]["torchrun"].append(self._processor([*torchrun, *words, "x"]))
                seconds["processor"]["ours"].append(self._processor([*python, *HOST, *words, "x"]))
                seconds["restart"]["torchrun"].append(self._restart([*torchrun, *end]))
                seconds["restart"]["ours"].append(self._restart([*python, *HOST, *end]))
                run = self._until_trained(lambda: self._command([*torchrun, *words, "x"]))
                seconds["again"]["torchrun"].append(run)
                seconds["again"]["ours"].append(self._until_trained(again))
        return seconds

    def _command(self, command: list[str]) -> float:
        began = time.monotonic()
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see bench/restart.py
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
        if done.returncode:
            raise RuntimeError(f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return time.monotonic() - began

    def _processor(self, command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._command(command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def _restart(self, command: list[str]) -> float:
        end = self._last_mark(lambda: self._command(command))
        return end - float(Path(self._folder, "killed").read_text())

    def _until_trained(self, run: Callable[[], object]) -> float:
        began = time.time()
        return self._last_mark(run) - began

    def _last_mark(self, run: Callable[[], object]) -> float:
        for old in Path(self._folder).glob("trained-*"):
            old.unlink()
        run()
        return max(float(Path(self._folder, f"trained-{rank}").read_text()) for rank in range(self._nproc))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"{', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--clone", nargs="+", default=[], metavar="MODULE=FOLDER", help="a module of a clone")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant (default: 5)")
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4], help="ranks (default: 2 4)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    everything = []
    print(f"{os.cpu_count()} CPUs; seconds\n{'program':>10} {'ranks':>5} {'':>8} {'torchrun':>22} {'ours':>22}")
    for program in [*args.programs, *args.clone] or PROGRAMS:
        for nproc in args.nproc:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                os.environ["MONARCH_STATE_DIR"] = f"{folder}/state"
                seconds = Bench(folder, program, nproc).measure(args.rounds)
            for what, times in seconds.items():
                ratio = statistics.median(times["ours"]) / statistics.median(times["torchrun"])
                cells = f"{spread(times['torchrun']):>22} {spread(times['ours']):>22} {ratio:6.3f}x"
                print(f"{program.partition('=')[0]:>10} {nproc:>5} {what:>8} {cells}", flush=True)
            everything.append({"program": program, "nproc": nproc, "seconds": seconds})
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
