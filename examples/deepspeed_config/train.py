# SPDX-License-Identifier: BSD-3-Clause
"""Train a small classifier with DeepSpeed and the configuration beside this file, and resume from its last checkpoint::

    pip install deepspeed
    torchx run -s monarch_local --wait --log monarch.spmd --nproc 2 --max_restarts 1 examples/deepspeed_config/train.py

The deepspeed launcher is not needed. A restart, or the same command again, resumes after the last saved step. On
several hosts ``--folder`` must be on a shared disk. Without GPUs the first start compiles a library of DeepSpeed's for
some minutes; if it is killed meanwhile, remove ``~/.cache/torch_extensions``, or the next one waits forever. The data
is made up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn

from torchx_monarch import progress

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints (default: 10)")
    parser.add_argument("--folder", type=Path, default=Path("deepspeed-checkpoints"), help="folder of the checkpoints")
    parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")))
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    _, saved = engine.load_checkpoint(str(args.folder))
    checkpoint = saved["step"] if saved else 0
    if engine.global_rank == 0:
        print(f"training on {engine.device}, world size {engine.world_size}, after step {checkpoint}", flush=True)
    for step in range(checkpoint + 1, args.steps + 1):
        torch.manual_seed(step * engine.world_size + engine.global_rank)
        points = torch.randn(BATCH, 2, device=engine.device)
        quadrants = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
        loss = nn.functional.cross_entropy(engine(points.bfloat16()), quadrants)
        engine.backward(loss)
        engine.step()
        if step % args.save_every == 0 or step == args.steps:
            engine.save_checkpoint(str(args.folder), f"step{step}", {"step": step}, save_latest=False)
            checkpoint = step
            if engine.global_rank == 0:  # all ranks have saved: DeepSpeed itself names a checkpoint the latest before
                (args.folder / ".latest").write_text(f"step{step}")
                (args.folder / ".latest").replace(args.folder / "latest")
                print(f"saved step {step} of {args.steps}, loss {loss.item():.4f}", flush=True)
        progress(step, args.steps, checkpoint=checkpoint, loss=loss.item())
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
