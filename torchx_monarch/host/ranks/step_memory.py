# SPDX-License-Identifier: BSD-3-Clause
"""The host's side of the memory through which ranks end their loops at one step (``training.steps``)."""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
import time
from collections.abc import Sequence

from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.insight.rank_sample import StepsRead
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
        if hasattr(os, "memfd_create"):  # as in ``rank_process``
            self._file = os.fdopen(os.memfd_create("steps"), "r+b", 0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._count = count
        self._target, self._is_confirmed = -1, False
        first = _RANK.pack(steps.KEY, int(ends_at * 1000), steps.NEVER, 0, 0, 0, 0, 0)
        os.pwrite(self._file.fileno(), first * count, 0)

    def variable(self, local_rank: int) -> str:
        """Return the value of ``steps.VARIABLE`` for a rank."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}:{local_rank}"

    def close(self) -> None:
        self._file.close()

    @property
    def is_used(self) -> bool:
        """Whether a rank has begun a loop of ``steps``."""
        return any(fields[steps.LOOPS] for fields in self._read())

    def last_step(self, local_rank: int) -> int | None:
        """Return the last step that a rank has begun, where its loop counts; None if there is none."""
        step = self._read()[local_rank][steps.STEP] - 1
        return step if 0 <= step < steps.MAX_STEP else None

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
        step = furthest[steps.STEP] - 1
        return StepsRead(
            passed=max(0, min(furthest[steps.PASSED], _HIGHEST)),
            done=max(0, min(furthest[steps.PASSED] - furthest[steps.LOOPS] + 1, _HIGHEST)),
            step=step if 0 <= step < steps.MAX_STEP else None,
            is_used=any(fields[steps.LOOPS] for fields in memory),
            running=len(running),
            left=tuple(
                rank for rank, fields in running if self._is_confirmed or fields[steps.WAITS_AT] != self._target
            ),
        )

    def _read(self) -> list[tuple[int, ...]]:
        size = _RANK.size
        data = os.pread(self._file.fileno(), self._count * size, 0).ljust(self._count * size, b"\0")
        return list(_RANK.iter_unpack(data))

    def _write(self, field: int, value: int) -> None:
        for local_rank in range(self._count):
            os.pwrite(self._file.fileno(), _WORD.pack(value), local_rank * _RANK.size + field * _WORD.size)
