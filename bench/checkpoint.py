# SPDX-License-Identifier: BSD-3-Clause
"""What a killed rank costs with checkpoints in memory, beside torchrun with torch.save on disk.

``python bench/checkpoint.py [--rounds N] [--mb MB]``. Each of two ranks has MB megabytes of state. A rank kills itself
in step 25 of 40, with a checkpoint every 10 steps of 0.2 s. ``ours`` is ``torchx_monarch.checkpoint`` on one host,
``two hosts`` the same on two, ``thread`` the same on one in a thread that saves a copy of the state while the next
steps go on, and ``torchrun`` saves with torch.save, renames, and deletes the one before last. Where
``dlrover[torch]``, grpcio and protobuf are installed, ``dlrover`` has its Flash Checkpoint, in which rank 0 saves.
NVRx's local checkpoints cannot take part: its ``BasicTensorAwareStateDict`` refuses tensors that are not CUDA's.

Printed are the medians of: the seconds from the kill to the first new step that has been done, those of loading alone,
and by which part saving makes the undisturbed steps longer, whose median is one beside which nothing is saved.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import json, os, shutil, signal, statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch, torch.distributed as dist
import torchx_monarch as tm

out, mb, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
torch.set_num_threads(1)
state, first, began = torch.zeros(mb << 18), 0, time.time()
disk = out / "disk"

def save(step, state):
    with tm.checkpoint(step, shared=False) as folder:
        torch.save({"step": step, "state": state}, folder / f"rank_{rank}.pt")

if kind == "thread":
    copied, saver, saving = state.clone(), ThreadPoolExecutor(1), None
if kind in ("ours", "thread"):
    last = tm.last_checkpoint()
elif kind == "dlrover":
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
    flash = DdpCheckpointer(str(disk))
    last = flash.load_checkpoint() or None
else:
    last = max(disk.glob("step_*"), key=lambda path: int(path.name[5:]), default=None)
if last is not None:
    saved = last if kind == "dlrover" else torch.load(last / f"rank_{rank}.pt", mmap=True)
    first = saved["step"] + 1
    state.copy_(saved["state"])
loaded = time.time() - began
durations = []
for step in range(first, 40):
    began = time.time()
    time.sleep(0.2)
    dist.all_reduce(torch.ones(1))
    if attempt == 1 and step == first:
        (out / f"again_{rank}").write_text(json.dumps({"at": time.time(), "loaded": loaded, "first": first}))
        if last is not None:
            break
    if step % 10 == 9 and kind == "ours":
        save(step, state)
    elif step % 10 == 9 and kind == "thread":
        if saving is not None:
            saving.result()
        copied.copy_(state)
        saving = saver.submit(save, step, copied)
    elif step % 10 == 9 and kind == "dlrover":
        flash.save_checkpoint(step, {"step": step, "state": state}, str(disk / str(step)), StorageType.MEMORY)
    elif step % 10 == 9:
        (part := disk / ".part").mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "state": state}, part / f"rank_{rank}.pt")
        with open(part / f"rank_{rank}.pt", "rb") as file:
            os.fsync(file.fileno())
        dist.barrier()
        if rank == 0:
            part.rename(disk / f"step_{step}")
            shutil.rmtree(disk / f"step_{step - 20}", ignore_errors=True)
        dist.barrier()
    durations.append(time.time() - began)
    if step == 24 and attempt == 0:
        durations, usual = durations[1:], statistics.median(durations)
        (out / f"slower_{rank}").write_text(str(sum(durations) / (len(durations) * usual) - 1))
    if step == 25 and attempt == 0 and rank == 1:
        (out / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""

# Without it, one restart of torchrun in three fails.
ENV = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# DLRover 0.6.1 starts its master with torch's SubprocessHandler, which has one argument more since torch 2.9.
DLROVER_ON_NEW_TORCH = """
import sys
if any("dlrover" in word for word in sys.orig_argv):
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    subprocess_handler.SubprocessHandler.__init__.__defaults__ = (None,)
"""

HOST = [sys.executable, "-m", "torchx_monarch.host", "--app", "bench", "--role", "bench"]


def once(variant: str, mb: int) -> dict[str, float]:
    """Return the seconds of one run; ``RuntimeError`` if it did not go on after the kill."""
    with tempfile.TemporaryDirectory(prefix="ck") as folder:
        (program := Path(folder, "program.py")).write_text(PROGRAM)
        hosts = 2 if variant == "two hosts" else 1
        sizes = ["--nproc-per-node", str(2 // hosts), "--nnodes", str(hosts), "--max-restarts", "1"]
        words = [*sizes, str(program), folder, str(mb), "ours" if hosts == 2 else variant]
        env = ENV
        if variant == "torchrun":
            commands = [[sys.executable, "-m", "torch.distributed.run", "--standalone", *words]]
        elif variant == "dlrover":
            Path(folder, "sitecustomize.py").write_text(DLROVER_ON_NEW_TORCH)
            env = {**ENV, "PYTHONPATH": folder}
            commands = [[sys.executable, "-m", "dlrover.trainer.torch.main", "--standalone", *words]]
        else:
            rendezvous = ["--replicas", str(hosts), "--rendezvous", f"unix:{folder}/r.sock", "--", "torchrun"]
            commands = [[*HOST, "--replica", str(replica), *rendezvous, *words] for replica in range(hosts)]
        with tempfile.TemporaryFile() as log:
            running = [subprocess.Popen(command, stdout=log, stderr=log, env=env) for command in commands]
            codes = [process.wait(300) for process in running]
            if any(codes) or not Path(folder, "again_0").exists():
                log.seek(0)
                raise RuntimeError(f"{variant}: {codes}\n{log.read().decode()}")
        killed = float(Path(folder, "killed").read_text())
        slower = max(float(Path(folder, f"slower_{rank}").read_text()) for rank in (0, 1))
        again = [json.loads(Path(folder, f"again_{rank}").read_text()) for rank in (0, 1)]
        return {
            "seconds to the next step": max(rank["at"] for rank in again) - killed,
            "of which loading": max(rank["loaded"] for rank in again),
            "steps redone": 26 - again[0]["first"],
            "slowdown by saving, %": 100 * slower,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=500)
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {"ours": [], "two hosts": [], "thread": [], "torchrun": []}
    if importlib.util.find_spec("dlrover"):
        results["dlrover"] = []
    for _ in range(args.rounds):
        for variant, found in results.items():
            found.append(once(variant, args.mb))
    for variant, found in results.items():
        medians = {name: statistics.median(result[name] for result in found) for name in found[0]}
        print(f"{variant:10}", ", ".join(f"{name} {value:.2f}" for name, value in medians.items()), flush=True)


if __name__ == "__main__":
    main()
