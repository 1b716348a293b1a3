# SPDX-License-Identifier: BSD-3-Clause
"""Train on digits in groups that fail one by one, with torchft and scikit-learn::

    torchx run -s monarch_local --wait --log monarch.ft -j 2x1 examples/ft_digits.py --steps 200

Kill a rank meanwhile: the other group trains on, and the lost one heals from it.
"""

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main(steps: int) -> None:
    """Train a linear model for some steps of all groups together."""
    dist.init_process_group("gloo")  # the ranks of this group; its store serves torchft's manager
    group = int(os.environ["REPLICA_GROUP_ID"])
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)  # the same weights in all groups
    model = torch.nn.Linear(64, 10)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "sgd": sgd.state_dict()}

    def load(healthy: dict[str, Any]) -> None:
        model.load_state_dict(healthy["model"])
        sgd.load_state_dict(healthy["sgd"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"group{group}_",
        use_async_quorum=False,
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
    while (step := manager.current_step()) < steps:
        draw = torch.Generator().manual_seed(step * 1000 + group)  # each group has batches of its own
        batch = torch.randint(len(images), (64,), generator=draw)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(parallel(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()  # counts only if all groups that take part have succeeded
        if step % 20 == 0:
            print(f"step {step} of {manager.num_participants()} groups: loss {loss.item():.3f}", flush=True)
    print(f"accuracy {(model(images).argmax(1) == labels).float().mean().item():.2f}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
