# SPDX-License-Identifier: BSD-3-Clause
"""A program of ranks that trains deterministically and saves each step, and dies where it is told to.

``python checkpoint_training.py FOLDER STEPS [--kill ATTEMPT:RANK:STEP:PHASE]… [--persist FOLDER] [--every SECONDS]``.
Ranks exchange numbers through files in FOLDER, as an all-reduce does. Each appends to ``FOLDER/done_RANK`` the attempt
and the step that it begins with and the steps that it does, and at the end writes its weight into ``FOLDER/end_RANK``.

Phases: ``step`` within the step, ``save`` in the middle of the file, ``saved`` before the block is left, ``left`` after
it, ``load`` before a checkpoint is read. With ``wait`` for RANK, all ranks wait there until they are killed; with
``waitN`` those of a world of N ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torchx_monarch as tm
from torchx_monarch.training.checkpoint import MEMORY


def advance(weight: int, total: int) -> int:
    return (weight * 6364136223846793005 + total) % (1 << 64)


def undisturbed(size: int, steps: int, only_rank_0: bool = False) -> list[int]:
    """Return the weights of all ranks after a training in which nothing happens."""
    return replayed([(0, size)], steps, only_rank_0)


def replayed(attempts: Iterable[tuple[int, int]], steps: int, only_rank_0: bool = False) -> list[int]:
    """Return the weights of all ranks after attempts that begin with these steps and numbers of ranks."""
    after = dict[int, list[int]]()
    for start, size in attempts:
        before = after.get(start - 1, [1] if only_rank_0 else [rank + 1 for rank in range(size)])
        weights = [before[rank % len(before)] for rank in range(size)]
        for step in range(start, steps):
            total = sum(weight % 1009 for weight in weights)
            after[step] = weights = [advance(weight, total) for weight in weights]
    return weights


class Rank:
    """The program."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        parser.add_argument("steps", type=int)
        parser.add_argument("--kill", action="append", default=[])
        parser.add_argument("--persist")
        parser.add_argument("--every", type=float, default=600.0)
        parser.add_argument("--own", action="store_true")
        parser.add_argument("--only-rank-0", action="store_true")
        self.args = parser.parse_args()

    def may_die(self, step: int, phase: str) -> None:
        for who in (self.rank, "wait", f"wait{self.size}"):
            if f"{self.attempt}:{who}:{step}:{phase}" in self.args.kill:
                if who == self.rank:
                    os.kill(os.getpid(), signal.SIGKILL)
                (aside := self.args.folder / f"new_{self.rank}").write_text(f"{os.getpid()} {os.environ[MEMORY]}")
                aside.rename(self.args.folder / f"waits_{self.rank}")
                time.sleep(1000)

    def all_reduce(self, step: int, value: int) -> int:
        """Exchange a number with all ranks of this attempt; return the sum."""
        values = f"{self.args.folder}/value_{self.attempt}_{self.size}_{step}"
        path = Path(f"{values}_{self.rank}")
        path.with_suffix(".new").write_text(str(value))
        path.with_suffix(".new").rename(path)
        total = 0
        for other in range(self.size):
            while not (sent := Path(f"{values}_{other}")).exists():
                time.sleep(0.001)
            total += int(sent.read_text())
        return total

    def note(self, text: str) -> None:
        with open(self.args.folder / f"done_{self.rank}", "a") as file:
            file.write(f"{text}\n")

    def train(self) -> None:
        args, alone = self.args, self.args.only_rank_0
        weight, start, name = 1 if alone else self.rank + 1, 0, f"rank_{0 if alone else self.rank}"
        if last := tm.last_checkpoint(args.persist):
            self.may_die(-1, "load")
            parts = [path.read_text().split() for path in last.glob("rank_*")]
            saved = 1 if alone else int(parts[0][2])  # ranks, which may have been more or fewer
            assert args.own or len(parts) == saved
            step, weight = map(int, (last / f"rank_{int(name[5:]) % saved}").read_text().split()[:2])
            start = step + 1
            assert last.name == f"step_{step}" and {part[0] for part in parts} == {str(step)}
        self.note(f"attempt {self.attempt} begins {start} from {last} with {self.size}")
        more = {"persist_every": args.every, "ranks": [0] if alone else None, "shared": not args.own}
        for step in range(start, args.steps):
            weight = advance(weight, self.all_reduce(step, weight % 1009))
            self.may_die(step, "step")
            if not alone or self.rank == 0:
                with tm.checkpoint(step, args.persist, **more) as folder:
                    with open(folder / name, "w") as file:
                        file.write(f"{step} ")
                        file.flush()
                        self.may_die(step, "save")
                        file.write(f"{weight} {self.size}")
                    self.may_die(step, "saved")
            self.note(f"{step}")
            self.may_die(step, "left")
        (args.folder / f"end_{self.rank}").write_text(str(weight))


if __name__ == "__main__":
    Rank().train()
