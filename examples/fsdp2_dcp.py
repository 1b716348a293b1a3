# SPDX-License-Identifier: BSD-3-Clause
"""Train a small transformer whose weights are sharded over the ranks (FSDP2), with sharded checkpoints (DCP)::

    torchx run -s monarch_local --wait --log monarch.spmd --nproc 2 --max_restarts 1 examples/fsdp2_dcp.py --steps 30

A restart resumes after the last saved step, which the hosts have in memory; so does the same command again, from the
copy on disk, also with another number of ranks. On several hosts ``--folder`` must be on a shared disk. The ranks use
NCCL if each has a GPU, else Gloo. The data is made up.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from torchx_monarch import checkpoint, last_checkpoint, progress

BATCH, LENGTH, VOCABULARY = 8, 32, 64


def build_model() -> nn.Sequential:
    """Return a model of scores, of shape (batch * length, vocabulary), from tokens of shape (batch, length)."""
    layers = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), *layers, nn.Flatten(0, 1), nn.Linear(64, VOCABULARY))


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save the shards of all ranks in the memory of their hosts, and each ten minutes and at the end in a folder."""
    weights, moments = get_state_dict(model, optimizer)
    with checkpoint(step, folder) as place:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=place)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint; return its step, or 0 if there is none."""
    last = last_checkpoint(folder)
    if last is None:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=last)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(last.name.removeprefix("step_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints (default: 10)")
    parser.add_argument("--folder", type=Path, default=Path("fsdp2-checkpoints"), help="folder of the checkpoints")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = build_model().to(device)
    for module in (model[1], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(args.folder, model, optimizer)
    if dist.get_rank() == 0:
        print(f"training on {device.type}, world size {mesh.size()}, after step {first}", flush=True)
    for step in range(first + 1, args.steps + 1):
        torch.manual_seed(step * mesh.size() + mesh.get_rank())  # each rank has data of its own in each step
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
        loss = cross_entropy(model(tokens), (5 * tokens.flatten() + 3) % VOCABULARY)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.save_every == 0 or step == args.steps:
            save(args.folder, step, model, optimizer)
            if dist.get_rank() == 0:
                print(f"saved step {step} of {args.steps}, loss {loss.item():.4f}", flush=True)
        progress(step, args.steps, loss=loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
