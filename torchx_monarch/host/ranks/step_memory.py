# SPDX-License-Identifier: BSD-3-Clause
"""The host's side of the memory through which ranks end their loops at one step (``training.steps``)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import struct
import time
from collections.abc import Sequence

from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.insight.rank_sample import Progress, StepsRead
from torchx_monarch.insight.step_progress import MAX_STEP
from torchx_monarch.system.safe_files import nameless_file
from torchx_monarch.training import steps

_WORD = struct.Struct("=q")
_RANK = struct.Struct(f"={steps.FIELDS}q")
_HIGHEST = 1 << 60

_POLL = 0.005


class StepMemory:
    """The memory of the ranks of an attempt on one host, by local rank.

    It is a file without a name, which no disk can delay, and the host reads and writes it as a file: a rank that makes
    it shorter does not end the host.

    Args:
        count: the number of ranks.
        ends_at: the known end of the job, in seconds since the epoch; 0 if there is none.
    """

    def __init__(self, count: int, ends_at: float) -> None:
        self._file = nameless_file()
        self._count = count
        self._target, self._is_confirmed = -1, False
        fields = [steps.KEY, int(ends_at * 1000), steps.NEVER]
        first = _RANK.pack(*fields, *[0] * (steps.FIELDS - len(fields)))
        os.pwrite(self._file.fileno(), first * count, 0)

    def variable(self, local_rank: int) -> str:
        """Return the value of ``steps.VARIABLE`` for a rank."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}:{local_rank}"

    def close(self) -> None:
        self._file.close()

    @property
    def is_used(self) -> bool:
        """Whether a rank has begun a loop of ``steps``."""
        return any(fields[steps.SINCE] for fields in self._read())

    def ignores_sigterm(self, local_rank: int) -> bool:
        """Whether a rank ignores SIGTERM, so that it must be ended by SIGKILL."""
        return self._read()[local_rank][steps.IGNORES] == 1

    def progress(self, local_rank: int, reported: Progress | None, now: float) -> Progress | None:
        """Return what a rank has reported by itself, with what its loops tell; None if nothing is known."""
        fields = self._read()[local_rank]
        since, saved_at = (min(max(fields[field] / 1000, 0.0), now) for field in (steps.SINCE, steps.SAVED))
        saved = fields[steps.CHECKPOINT] - 1
        last = _last_step(fields)
        if reported is None and last is not None:
            reported = Progress(last, None, now, first_step=fields[steps.FIRST] - 1, first_time=since)
        if reported is not None and 0 <= saved < MAX_STEP and saved_at > reported.checkpoint_time:
            return dataclasses.replace(reported, checkpoint=saved, checkpoint_time=saved_at)
        return reported

    async def stop(self, ranks: Sequence[Rank], target: int, *, confirmed: bool, seconds: float) -> StepsRead:
        """Have ranks stop at a step; return when all that run wait at it, or one has passed it (``StopAtStep``)."""
        if seconds:
            self._write(steps.END, int((time.time() + seconds) * 1000))
        if confirmed:
            self._is_confirmed = True
            self._write(steps.CONFIRMED, target)
        elif target > self._target:
            self._target = target
            self._write(steps.TARGET, target)
        while True:
            found = self._look(ranks)
            if confirmed or target < 0 or found.passed > target or not found.left:
                return found
            await asyncio.sleep(_POLL)

    def _look(self, ranks: Sequence[Rank]) -> StepsRead:
        memory = self._read()
        running = [(rank.rank, memory[rank.local_rank]) for rank in ranks if rank.is_running]
        furthest = max(memory, key=lambda fields: fields[steps.PASSED], default=None)
        if furthest is None:
            return StepsRead()
        return StepsRead(
            passed=_count(furthest[steps.PASSED]),
            done=_done(furthest),
            step=_last_step(furthest),
            is_used=any(fields[steps.SINCE] for fields in memory),
            running=len(running),
            left=tuple(
                (_count(fields[steps.PASSED]), rank)
                for rank, fields in running
                if self._is_confirmed or fields[steps.WAITS_AT] != self._target
            ),
        )

    def _read(self) -> list[tuple[int, ...]]:
        size = _RANK.size
        data = os.pread(self._file.fileno(), self._count * size, 0).ljust(self._count * size, b"\0")
        return list(_RANK.iter_unpack(data))

    def _write(self, field: int, value: int) -> None:
        for local_rank in range(self._count):
            os.pwrite(self._file.fileno(), _WORD.pack(value), local_rank * _RANK.size + field * _WORD.size)


def _count(said: int) -> int:
    return max(0, min(said, _HIGHEST))


def _done(fields: Sequence[int]) -> int:
    """Return how many steps a rank has done: all that it has begun if it waits at a stop point."""
    waits = fields[steps.WAITS_AT] == fields[steps.PASSED] > 0
    done = fields[steps.BEGUN] if waits else fields[steps.PASSED] - fields[steps.LOOPS]
    return _count(done)


def _last_step(fields: Sequence[int]) -> int | None:
    """Return the number of the last step that a rank has done; None if there is none, or steps have no numbers."""
    done, first = _done(fields), fields[steps.FIRST] - 1
    return first + done - 1 if done and 0 <= first <= MAX_STEP - done else None
