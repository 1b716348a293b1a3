# SPDX-License-Identifier: BSD-3-Clause
"""Train a small network on real handwritten digits with DistributedDataParallel.

An ordinary torchrun program; nothing in it knows how it was launched::

    torchx run -s monarch_local --wait --log monarch.spmd --nproc 4 examples/digits.py
    torchrun --standalone --nproc-per-node 4 examples/digits.py
    python examples/digits.py

The 1797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. The ranks use NCCL when each has a GPU
of its own, else Gloo. Every few epochs rank 0 writes a checkpoint; a later run with the same folder goes on from there.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = "latest.pt"


class CheckpointError(Exception):
    """The checkpoint that is there cannot be used."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate (default: 0.002)")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks together (default: 64)"
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=Path("digits-checkpoints"),
        help="folder of the checkpoint; training goes on from one that is there (default: digits-checkpoints)",
    )
    parser.add_argument("--checkpoint-every", type=int, default=5, help="epochs between two checkpoints (default: 5)")
    parser.add_argument("--fresh", action="store_true", help="start anew, ignoring a checkpoint that is there")
    parser.add_argument(
        "--min-accuracy", type=float, default=0.0, help="exit with 1 when the test accuracy, 0 to 1, stays below"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "checkpoint_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if not 0 <= args.min_accuracy <= 1:
        parser.error(f"--min-accuracy must be between 0 and 1, not {args.min_accuracy}")
    return args


def init_distributed() -> torch.device:
    """Joins the process group the launcher describes, or a group of one when there is no launcher."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return device


def load_data(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels. The split is the same in every run and on every rank."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test = (torch.tensor(p, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16 for p in parts[:2])
    y_train, y_test = (torch.tensor(p, dtype=torch.int64, device=device) for p in parts[2:])
    return x_train, y_train, x_test, y_test


def shares(count: int, batch_size: int, seed: int, rank: int, world_size: int) -> Iterator[tuple[Tensor, int]]:
    """One epoch's steps as this rank sees them: the indices of its share, and how many images the step has in all.

    Every image is used exactly once per epoch: nothing is repeated to fill the last step up and nothing dropped. All
    ranks take the same number of steps, as DDP requires; in the last one a rank's share may be smaller, or empty.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for step in order.split(batch_size):
        yield step[rank::world_size], len(step)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, batch_size: int, seed: int
) -> float:
    """Trains one epoch; the mean loss over all images of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.train()
    total = torch.zeros((), device=x.device)
    for share, step_size in shares(len(x), batch_size, seed, rank, world_size):
        share = share.to(x.device)
        loss = cross_entropy(model(x[share]), y[share], reduction="sum")
        optimizer.zero_grad()
        # DDP averages over ranks. Scaled like this the average is the gradient of the whole step's mean loss even when
        # the ranks' shares differ in size.
        (loss * (world_size / step_size)).backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total) / len(x)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of the images that are classified rightly; each image is looked at by exactly one rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.eval()
    right = (model(x[rank::world_size]).argmax(1) == y[rank::world_size]).sum()
    dist.all_reduce(right)
    return int(right) / len(x)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes aside and renames: whoever reads `path`, and whenever the job is killed, finds a whole checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any] | None:
    """The checkpoint as rank 0 finds it, on every rank: the others need not see rank 0's disk.

    Raises CheckpointError, on every rank, when there is one that cannot be used.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0 and path.exists():
        try:
            found[0] = torch.load(path, map_location="cpu", weights_only=True)
            build_model().load_state_dict(found[0]["model"])
        except Exception as e:  # torch and pickle raise whatever the bytes lead them to
            found[0] = type(e).__name__
    dist.broadcast_object_list(found, src=0, device=device)
    if isinstance(found[0], str):
        message = f"{path.absolute()} is no checkpoint of this program ({found[0]}): remove it, or use --fresh"
        raise CheckpointError(message)
    state: dict[str, Any] | None = found[0]
    return state


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    device = init_distributed()
    try:
        reached = train(args, device)
        problem = f"test accuracy {reached:.2%} is below --min-accuracy {args.min_accuracy:.2%}"
        failed = reached < args.min_accuracy
    except CheckpointError as e:
        problem, failed = str(e), True
    rank = dist.get_rank()
    dist.destroy_process_group()
    # Rank 0 speaks for all: were every rank to exit with 1, the launcher could not name the one to look at.
    if failed and rank == 0:
        print(f"digits.py: {problem}", file=sys.stderr)
        return 1
    return 0


def train(args: argparse.Namespace, device: torch.device) -> float:
    """Trains, or goes on training, to the end; the test accuracy, 0 to 1, the same on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    started = time.monotonic()
    x_train, y_train, x_test, y_test = load_data(device)
    torch.manual_seed(args.seed)
    net = build_model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    path: Path = args.checkpoint_dir / CHECKPOINT
    state = None if args.fresh else load_checkpoint(path, device)
    epochs_done = 0
    say(
        f"{len(x_train)} training and {len(x_test)} test images; {world_size} rank{'s' * (world_size > 1)} "
        f"on {device.type} ({dist.get_backend()}); {args.epochs} epochs, batches of {args.batch_size}"
    )
    if state is not None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = args.lr
        epochs_done = int(state["epoch"])
        say(f"resumed after epoch {epochs_done} from {path.absolute()}")
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)

    reached = accuracy(model, x_test, y_test) if epochs_done else math.nan
    width = len(str(args.epochs))
    for epoch in range(epochs_done + 1, args.epochs + 1):
        epoch_started = time.monotonic()
        torch.manual_seed(args.seed + 1000 * rank + epoch)  # dropout: other on each rank, the same after a restart
        loss = train_epoch(model, optimizer, x_train, y_train, args.batch_size, args.seed + epoch)
        reached = accuracy(model, x_test, y_test)
        seconds = time.monotonic() - epoch_started
        say(f"epoch {epoch:{width}}/{args.epochs}  loss {loss:.4f}  test accuracy {reached:6.2%}  {seconds:.2f} s")
        if rank == 0 and (epoch % args.checkpoint_every == 0 or epoch == args.epochs):
            state = {"epoch": epoch, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(path, state)
    epochs_done = max(epochs_done, args.epochs)
    say(
        f"done: test accuracy {reached:.2%} after {epochs_done} epochs, {time.monotonic() - started:.1f} s; "
        f"checkpoint in {path.absolute()}"
    )
    return reached


if __name__ == "__main__":
    sys.exit(main())
