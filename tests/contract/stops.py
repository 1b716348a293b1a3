# SPDX-License-Identifier: BSD-3-Clause
"""A job that is stopped again and again: all ranks end at one step and save, and no step is done twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.contract.place import Place

#: Ranks of unequal speed, which wait for each other at every EACH-th step. STUCK does not come to the one after 5 more.
TRAIN = """
    import os, sys, time, torchx_monarch as tm
    folder, each, stuck = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    saved = f"{folder}/saved"
    start = int(open(saved).read()) if os.path.exists(saved) else 0
    done = open(f"{folder}/done_{rank}", "a", buffering=1)
    for step in tm.steps(range(start, 1_000_000)):
        if rank == stuck and step == start + 5:
            time.sleep(1000)
        time.sleep(0.02 * (1 + rank % 3))
        if step % each == 0:
            open(f"{folder}/{step}.{rank}", "w").close()
            while not all(os.path.exists(f"{folder}/{step}.{other}") for other in range(world)):
                time.sleep(0.005)
        print(step, file=done)
    if rank == 0:
        with open(f"{saved}.new", "w") as file:
            file.write(str(step + 1))
        os.rename(f"{saved}.new", saved)
"""


class StoppedJob:
    """A job on two hosts that goes on after each stop.

    Args:
        folder: what its ranks share, made here.
        each: the ranks wait for each other at each step that this divides.
        stuck: the rank that does not come to a step; -1 for none.
        role: fields of its role.
        cfg: its run options.
    """

    def __init__(
        self, place: Place, folder: Path, each: int, stuck: int = -1, *, role: Mapping[str, Any], **cfg: Any
    ) -> None:
        folder.mkdir()
        self.place, self.saved = place, 0
        self._folder, self._cfg = folder, cfg
        self._role = place.torchrun(place.program(TRAIN), str(folder), str(each), str(stuck), **role)
        self.submit()

    def submit(self) -> None:
        self.handle = self.place.run(self._role, **self._cfg)

    @property
    def id(self) -> str:
        return self.handle.rpartition("/")[2]

    def until_trains(self, steps: int) -> None:
        """Wait until all ranks have done some steps since the last start."""
        until = self.saved + steps
        self.place.until(lambda: min(map(len, self._steps())) >= until, lambda: f"steps: {self._steps()}", self.handle)

    def until_saved(self) -> None:
        """Wait until the step of a stop is saved; check that all ranks have done each step once."""
        self.place.until(lambda: self._last_saved() > self.saved, "a checkpoint", self.handle)
        self.saved = self._last_saved()
        for steps in self._steps():
            assert steps == [*range(len(steps))] and len(steps) >= self.saved, self.place.everything(self.handle)

    def _last_saved(self) -> int:
        path = self._folder / "saved"
        return int(path.read_text()) if path.exists() else 0

    def _steps(self) -> list[list[int]]:
        """Return the steps that each rank has done."""
        paths = [self._folder / f"done_{rank}" for rank in range(4)]
        return [[int(line) for line in path.read_text().split()] if path.exists() else [] for path in paths]
