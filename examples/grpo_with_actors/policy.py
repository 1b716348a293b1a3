# SPDX-License-Identifier: BSD-3-Clause
"""A policy that writes digits, the reward of what it writes, and the loss of GRPO (https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

DIGITS = 10
LENGTH = 4
CLIP = 0.2
KL_WEIGHT = 0.01


class Policy(nn.Module):
    """A recurrent network with random weights: from each digit of a text to the logits of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(DIGITS, 64, batch_first=True)
        self.head = nn.Linear(64, DIGITS)

    def forward(self, texts: Tensor) -> Tensor:
        """Return, for texts of shape (..., LENGTH + 1), the log probability of each digit after the first."""
        flat = texts.reshape(-1, texts.shape[-1])
        hidden, _ = self.cell(one_hot(flat[:, :-1], DIGITS).float())
        logits = self.head(hidden).log_softmax(-1)
        chosen: Tensor = logits.gather(-1, flat[:, 1:, None])
        return chosen.reshape(*texts.shape[:-1], LENGTH)

    @torch.no_grad()
    def write(self, prompts: Tensor, group: int) -> Tensor:
        """Return ``group`` texts after each prompt: shape (prompts, group, LENGTH + 1)."""
        texts, hidden = prompts.repeat_interleave(group)[:, None], None
        for _ in range(LENGTH):
            output, hidden = self.cell(one_hot(texts[:, -1:], DIGITS).float(), hidden)
            texts = torch.cat([texts, self.head(output[:, -1]).softmax(-1).multinomial(1)], 1)
        return texts.reshape(len(prompts), group, LENGTH + 1)


def reward(texts: Tensor) -> Tensor:
    """Return the share of digits that count on from the one before: 7 8 9 0 1 has 1.0."""
    return ((texts[..., :-1] + 1) % DIGITS == texts[..., 1:]).float().mean(-1)


def grpo_loss(new: Tensor, old: Tensor, reference: Tensor, rewards: Tensor) -> Tensor:
    """Return the clipped loss with advantages relative to the group, and the penalty for leaving the reference.

    Args:
        new, old, reference: log probabilities by the policy that is trained, the one that wrote the texts, and the
            first one; shape (prompts, group, LENGTH).
        rewards: shape (prompts, group).
    """
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages[..., None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[..., None])
    kl = (reference - new).exp() - (reference - new) - 1
    return (KL_WEIGHT * kl - gain).mean()
