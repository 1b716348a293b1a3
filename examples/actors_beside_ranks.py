# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train on handwritten digits by ranks, and evaluate beside them by actors: one on each host of the same job.

An ordinary torchrun program whose rank 0 spawns Monarch actors on the hosts that it runs on::

    torchx run -s monarch_local --wait --log monarch.spmd -j 2x2 examples/actors_beside_ranks.py

After each epoch rank 0 sends the weights and trains on; each evaluator tests them on its share of the test images.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from monarch.actor import Actor, Future, current_rank, endpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torchx_monarch import this_job

BARS = " ▁▂▃▄▅▆▇█"
TEST_IMAGES = 360


def load_data(test: bool) -> tuple[Tensor, Tensor]:
    """Return images, of shape (count, 64), and labels; the test images are the last 360 of 1797."""
    images, labels = load_digits(return_X_y=True)
    part = slice(-TEST_IMAGES, None) if test else slice(0, -TEST_IMAGES)
    return torch.tensor(images[part], dtype=torch.float32) / 16, torch.tensor(labels[part])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Evaluator(Actor):
    """Test weights on a share of the test images.

    Args:
        shares: number of evaluators.
    """

    def __init__(self, shares: int) -> None:
        images, labels = load_data(test=True)
        share = slice(current_rank().rank, None, shares)
        self.images, self.labels = images[share], labels[share]
        self.model = build_model()

    @endpoint
    def evaluate(self, weights: dict[str, Any]) -> int:
        """Return how many images of the share are classified rightly."""
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        with torch.no_grad():
            return int((self.model(self.images).argmax(1) == self.labels).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: 20)")
    epochs = parser.parse_args().epochs
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    evaluators, answers = None, list[Future[Any]]()
    if rank == 0:
        workers = this_job().state().workers  # the hosts of this job
        hosts = workers.sizes["hosts"]
        evaluators = workers.spawn_procs().spawn("evaluator", Evaluator, hosts)
        print(f"{ranks} ranks train, {hosts} evaluator{'s' * (hosts > 1)} beside them", flush=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images, labels = load_data(test=False)
    losses = []
    for epoch in range(epochs):
        total = torch.zeros(())
        for step in torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).split(64):
            share = step[rank::ranks]
            loss = cross_entropy(model(images[share]), labels[share])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(share)
        dist.all_reduce(total)
        losses.append(float(total) / len(images))
        if evaluators is not None:  # the answers are awaited at the end: training does not wait for them
            weights = {name: tensor.numpy().copy() for name, tensor in model.module.state_dict().items()}
            answers.append(evaluators.evaluate.call(weights))
    if rank == 0:
        right = [sum(count for _, count in answer.get(timeout=300)) / TEST_IMAGES for answer in answers]
        print(f"loss      {curve(losses)}  {losses[0]:.3f} to {losses[-1]:.3f}")
        print(f"accuracy  {curve(right)}  {right[0]:.1%} to {right[-1]:.1%} of {TEST_IMAGES} test images", flush=True)
    dist.destroy_process_group()


def curve(values: list[float]) -> str:
    """Return one bar for each value, as high as the value is between zero and the largest."""
    return "".join(BARS[round(value / max(values) * (len(BARS) - 1))] for value in values)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
