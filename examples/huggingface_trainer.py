# SPDX-License-Identifier: BSD-3-Clause
"""Train a tiny GPT-2 with Hugging Face's Trainer, and resume from its last checkpoint::

    pip install 'transformers[torch]'
    torchx run -s monarch_local --wait --log monarch.spmd --nproc 2 --max_restarts 1 examples/huggingface_trainer.py

A restart, or the same command again, resumes after the last saved step. On several hosts ``--folder`` must be on a
shared disk. Nothing is downloaded: the weights are random and the tokens made up.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from torchx_monarch import progress

VOCABULARY, LENGTH = 64, 32


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Made-up texts, in which each token follows from the one before it."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = [index % VOCABULARY]
        for _ in range(LENGTH - 1):
            text.append((5 * text[-1] + 3) % VOCABULARY)
        return {"input_ids": torch.tensor(text), "labels": torch.tensor(text)}


class Progress(TrainerCallback):
    """Report steps to ``torchx monarch status``."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.saved = state.global_step
        if state.is_world_process_zero:
            print(f"training on {args.device}, world size {args.world_size}, after step {self.saved}", flush=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.saved = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        progress(state.global_step, state.max_steps, checkpoint=self.saved)


def find_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint; remove what a killed save has left: the state of the Trainer is written last."""
    for path in folder.glob("checkpoint-*"):
        if not (path / "trainer_state.json").exists():
            shutil.rmtree(path)
    return get_last_checkpoint(str(folder)) if folder.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints (default: 10)")
    parser.add_argument("--folder", type=Path, default=Path("gpt2-checkpoints"), help="folder of the checkpoints")
    options = parser.parse_args()
    settings = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=options.save_every,
        learning_rate=3e-3,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    size = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**size, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Tokens(), callbacks=[Progress()])
    with settings.main_process_first(local=False):
        checkpoint = find_checkpoint(options.folder)
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
