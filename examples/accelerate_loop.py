# SPDX-License-Identifier: BSD-3-Clause
"""Train a small classifier in a loop of one's own with Hugging Face's accelerate, and resume from its last checkpoint::

    pip install accelerate
    torchx run -s monarch_local --wait --log monarch.spmd --nproc 2 --max_restarts 1 examples/accelerate_loop.py

``accelerate launch`` is not needed: its configuration reaches the program as variables. A restart, or the same command
again, resumes after the last saved step. On several hosts ``--folder`` must be on a shared disk. The data is made up.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchx_monarch import progress

BATCH = 64
MAX_CHECKPOINTS = 2


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save in a folder that is renamed once all ranks have written their part, so that a kill loses nothing."""
    accelerator.save_state(str(folder / f".step-{step}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / f".step-{step}").replace(folder / f"step-{step}")
        for old in saved_steps(folder)[:-MAX_CHECKPOINTS]:
            shutil.rmtree(folder / f"step-{old}")


def load(accelerator: Accelerator, folder: Path) -> int:
    """Load the last checkpoint; return its step, or 0 if there is none."""
    with accelerator.main_process_first():
        step = max(saved_steps(folder), default=0)
        if accelerator.is_main_process:
            for incomplete in folder.glob(".step-*"):
                shutil.rmtree(incomplete)
    if step:
        accelerator.load_state(str(folder / f"step-{step}"))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints (default: 10)")
    parser.add_argument("--folder", type=Path, default=Path("accelerate-checkpoints"), help="folder of the checkpoints")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]))
    torch.manual_seed(0)  # all ranks begin with the same weights
    points = torch.randn(BATCH * accelerator.num_processes * args.steps, 2)
    quadrants = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Each rank gets every num_processes-th batch.
    data = DataLoader(TensorDataset(points, quadrants), batch_size=BATCH)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    checkpoint = load(accelerator, args.folder)
    where = f"{accelerator.device.type}, world size {accelerator.num_processes}"
    accelerator.print(f"training on {where}, after step {checkpoint}", flush=True)
    batches = accelerator.skip_first_batches(data, checkpoint)
    for step, (inputs, labels) in enumerate(batches, start=checkpoint + 1):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % args.save_every == 0 or step == args.steps:
            save(accelerator, args.folder, step)
            checkpoint = step
            accelerator.print(f"saved step {step} of {args.steps}, loss {loss.item():.4f}", flush=True)
        progress(step, args.steps, checkpoint=checkpoint, loss=loss.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
