# SPDX-License-Identifier: BSD-3-Clause
"""Train a small network with Lightning, and resume from its last checkpoint::

    pip install lightning
    torchx run -s monarch_local --wait --log monarch.spmd --nproc 2 --max_restarts 1 examples/lightning_fit.py

A restart, or the same command again, resumes after the last saved step. On several hosts ``--folder`` must be on a
shared disk. Lightning keeps the last two checkpoints, and the one from which it has resumed. The data is made up.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from torchx_monarch import progress


class Classifier(LightningModule):
    """Say in which quadrant points of the plane are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        points, quadrants = batch
        return cross_entropy(self.model(points), quadrants)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Progress(Callback):
    """Report steps to ``torchx monarch status``."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.saved = trainer.global_step
        if trainer.is_global_zero:
            where = f"{module.device.type}, world size {trainer.world_size}"
            print(f"training on {where}, after step {self.saved}", flush=True)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.saved = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        progress(trainer.global_step, trainer.max_steps, checkpoint=self.saved, loss=outputs["loss"].item())


class RenamedCheckpoints(TorchCheckpointIO):
    """Save checkpoints in files that are renamed once they are complete, so that a kill loses nothing.

    Lightning moves them from the folder of temporary files, which is a copy where that is another disk.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str, storage_options: Any | None = None) -> None:
        super().save_checkpoint(checkpoint, f"{path}.incomplete", storage_options)
        Path(f"{path}.incomplete").replace(path)


def last_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints (default: 10)")
    parser.add_argument("--folder", type=Path, default=Path("lightning-checkpoints"), help="folder of the checkpoints")
    options = parser.parse_args()
    ranks, local_ranks = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    checkpoints = ModelCheckpoint(
        options.folder, "{step}", monitor="step", mode="max", save_top_k=2, save_on_train_epoch_end=True
    )
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= local_ranks else "cpu",
        devices=local_ranks,
        num_nodes=ranks // local_ranks,
        max_steps=options.steps,
        callbacks=[Progress(), checkpoints],
        plugins=[RenamedCheckpoints()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # An epoch is what is trained between two checkpoints: between epochs Lightning resumes with the next batch.
    points = torch.randn(64 * ranks * options.save_every, 2, generator=torch.Generator().manual_seed(0))
    quadrants = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    data = DataLoader(TensorDataset(points, quadrants), batch_size=64, shuffle=True)
    trainer.fit(Classifier(), data, ckpt_path=last_checkpoint(options.folder))


if __name__ == "__main__":
    main()
