# SPDX-License-Identifier: BSD-3-Clause
"""Train a policy by GRPO: ranks train it, and an actor on each of their hosts writes the texts that they learn from::

    torchx run -s monarch_local --wait --log monarch.spmd -j 2x2 examples/grpo_with_actors/train.py

While the ranks train on the texts of one step, the actors write those of the next, with the weights of the step before.
Nothing is downloaded: the policy begins with random weights, and is to learn to count on from a digit.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

from torchx_monarch import progress, this_job  # isort: skip  (before Monarch, which else opens a log file in /tmp)
import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint
from policy import DIGITS, LENGTH, Policy, grpo_loss, reward
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

PROMPTS = 16
GROUP = 16
FOLDER = str(Path(__file__).parent)


def find_modules() -> None:
    """Let a process of actors import the modules beside this script, as ranks can."""
    sys.path.insert(0, FOLDER)


class Generator(Actor):
    """Write texts after a share of the prompts.

    Args:
        shares: number of generators.
    """

    def __init__(self, shares: int) -> None:
        torch.set_num_threads(1)  # the other processors are for the ranks
        torch.manual_seed(current_rank().rank)
        self.shares, self.policy = shares, Policy()

    @endpoint
    def write(self, weights: dict[str, Any], prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return texts, and their log probabilities by the policy with these weights."""
        self.policy.load_state_dict(weights)
        texts = self.policy.write(prompts[current_rank().rank :: self.shares], GROUP)
        with torch.no_grad():
            return texts, self.policy(texts)


class Generators:
    """The generators of a job, one on each host, as its rank 0 uses them."""

    def __init__(self) -> None:
        workers = this_job().state().workers  # the hosts of this job
        hosts = workers.sizes["hosts"]
        self.actors = workers.spawn_procs(bootstrap=find_modules).spawn("generator", Generator, hosts)
        print(f"{dist.get_world_size()} ranks train, {hosts} generators write beside them", flush=True)

    def begin(self, policy: Policy) -> None:
        """Have texts written, without waiting for them."""
        weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        self.answer = self.actors.write.call(weights, torch.randint(DIGITS, (PROMPTS,)))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the texts that were begun, and their log probabilities."""
        texts, old = zip(*(part for _, part in self.answer.get(timeout=300)), strict=True)
        return torch.cat(texts), torch.cat(old)


def train(steps: int) -> None:
    """Train; print the rewards of the first and of the trained policy."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = Policy()
    reference = copy.deepcopy(policy)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generators = Generators() if rank == 0 else None
    if generators is not None:
        generators.begin(policy)
    rewards = []
    for step in range(1, steps + 1):
        texts = torch.empty(PROMPTS, GROUP, LENGTH + 1, dtype=torch.long)
        old = torch.empty(PROMPTS, GROUP, LENGTH)
        if generators is not None:
            texts, old = generators.finish()
            generators.begin(policy)
        dist.broadcast(texts, 0)
        dist.broadcast(old, 0)
        share = slice(rank, None, ranks)
        with torch.no_grad():
            first = reference(texts[share])
        loss = grpo_loss(model(texts[share]), old[share], first, reward(texts[share]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward(texts).mean().item())
        progress(step, steps, reward=rewards[-1])
    if generators is not None:
        texts, _ = generators.finish()
        last = reward(texts).mean().item()
        print(f"reward {rewards[0]:.2f} to {last:.2f} of 1.00 in {steps} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps must be 1 or more, not {steps}")
    dist.init_process_group("gloo")
    train(steps)  # a function: with its DDP model alive, torch can wait for itself in the next line
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
