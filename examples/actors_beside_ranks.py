# SPDX-License-Identifier: BSD-3-Clause
"""Train on handwritten digits by ranks, and evaluate beside them by actors: one on each host of the same job.

An ordinary torchrun program whose rank 0 spawns Monarch actors on the hosts that it runs on::

    torchx run -s monarch_local --wait --log monarch.spmd -j 2x2 examples/actors_beside_ranks.py

After each epoch rank 0 sends the weights and trains on; each evaluator tests them on its share of the test images.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchx_monarch import this_job  # isort: skip  (before Monarch, which else opens a log file in /tmp)
import torch
import torch.distributed as dist
from monarch.actor import Actor, Future, current_rank, endpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BARS = "▁▂▃▄▅▆▇█"
TEST_IMAGES = 360


def load_data(test: bool) -> tuple[Tensor, Tensor]:
    """Return images, of shape (count, 64), and labels: those for tests, or those for training."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=TEST_IMAGES, random_state=0, stratify=labels)
    return torch.tensor(parts[test], dtype=torch.float32) / 16, torch.tensor(parts[2 + test])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Evaluator(Actor):
    """Test weights on a share of the test images.

    Args:
        shares: number of evaluators.
    """

    def __init__(self, shares: int) -> None:
        torch.set_num_threads(1)  # the other processors are for the ranks
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
    if epochs < 1:
        parser.error(f"--epochs must be 1 or more, not {epochs}")
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
    del model  # after the group's end its reducer may wait for ever for a thread of Gloo, which waits for the GIL
    dist.destroy_process_group()


def curve(values: list[float]) -> str:
    """Return one bar for each value, the lowest for the smallest and the highest for the largest."""
    low, high = min(values), max(values)
    return "".join(BARS[round((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in values)


if __name__ == "__main__":
    main()
