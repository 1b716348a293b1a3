# SPDX-License-Identifier: BSD-3-Clause
"""Watch and stop the processes of a run on one host, with exact exit codes: its ranks, or the process of a command.

What only clients ask for is imported when they do: a host process of a command is to cost little.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.model.job_result import EARLY_FAILURES_WITHIN, RankExit
from torchx_monarch.model.world import World
from torchx_monarch.system import error_files
from torchx_monarch.system.cgroups import OutOfMemory
from torchx_monarch.system.children import end_orphans
from torchx_monarch.system.console import WriterThread
from torchx_monarch.system.untrusted_text import one_line
from torchx_monarch.transport import messages

if TYPE_CHECKING:
    from torchx_monarch.host.ranks.rank_stacks import RankStacks
    from torchx_monarch.insight.profile import RankProfile
    from torchx_monarch.insight.rank_sample import RankSamples
    from torchx_monarch.insight.stacks import ProcessStacks

_STACKS_TIMEOUT = 3.0
"""Seconds for the processes of a rank to write their stacks, when a client asks for them."""

_KILL_TIMEOUT = 30.0
"""Seconds for a process to end after SIGKILL: the kernel may have much memory to give back."""

_MAX_LINE = 300
"""Characters of a rank's last output in its exit."""


class ProcessPool:
    """Watch and stop the processes of a run on one host.

    Attributes:
        world: that of the last attempt that was launched; None for none.
        ranks: the processes of that attempt.
        remains: what of it lives on after ``stop``, and why; empty if nothing does.

    Args:
        marker: the value of ``processes.MARKER`` in their environment.
        disk: see ``Host.disk``.
    """

    def __init__(self, replica: int, hostname: str, marker: str, disk: WriterThread) -> None:
        self.world: World | None = None
        self.ranks: list[Rank] = []
        self.remains = ""
        self._replica = replica
        self._hostname = hostname
        self._marker = marker
        self._disk = disk
        self._stops = 0
        self._memory = OutOfMemory()
        self._clearing = asyncio.Lock()

    def close(self) -> None:
        """Release what the pool holds; its processes run on."""

    async def watch(self) -> None:
        """Show the output, and wait until a process has failed or all have ended; then send SIGTERM to the others.

        After an early failure (``RankExit.is_early``) the others have a moment to fail as well.

        The controller calls this after its progress line about the launch, which thus precedes the output.
        """
        ranks = self.ranks
        for rank in ranks:
            rank.release()
        for end in asyncio.as_completed([rank.wait() for rank in ranks]):
            if await end:
                if all(self._exit_of(rank).is_early for rank in ranks if rank.returncode):
                    await _until_ended(ranks, EARLY_FAILURES_WITHIN)
                # The controller then stops those of the other hosts, and waits for all.
                await self._signal(ranks, signal.SIGTERM)
                return
        await self._clear_up(ranks)

    async def stop(self, number: int, grace: float) -> None:
        """Send a signal to every process, and SIGKILL after ``grace`` seconds; return when all have ended.

        End all processes that they have started. One that is already shutting down gets SIGKILL only. Without
        processes nothing happens. ``remains`` says what not even SIGKILL has ended.
        """
        ranks = self.ranks
        self._stops += 1
        if not ranks or self.remains:
            return
        for rank in ranks:
            rank.release()
        await self._signal(ranks, number)
        await _until_ended(ranks, grace)
        await self._signal(ranks, signal.SIGKILL)
        await _until_ended(ranks, _KILL_TIMEOUT)
        left = [rank.pid for rank in ranks if rank.is_running] + await self._clear_up(ranks)
        if left:
            pids = ", ".join(map(str, left))
            self.remains = f"not even SIGKILL ends pid {pids}, as if it waits inside the kernel for a disk or a device"

    @property
    def uses_steps(self) -> bool:
        """Whether they can come to an agreed stop (``training.steps``)."""
        return False

    async def let_end(self, seconds: float) -> None:
        """Wait until all processes have ended, at most so many seconds."""
        await _until_ended(self.ranks, seconds)

    def notify(self, number: int) -> None:
        """Send a signal to the processes but not to their process groups; they do not count as stopped."""
        for rank in self.ranks:
            rank.send(number)

    async def exits(self) -> list[RankExit]:
        """Return the exits of the processes of this attempt that have ended."""
        ended = [rank for rank in self.ranks if not rank.is_running]
        # All exits of a host must fit into one message.
        limit = min(error_files.TRACEBACK_BYTES, messages.MAX_LINE // (4 * max(1, len(self.ranks))))
        return await self._disk.run(lambda: [self._read_exit(rank, limit) for rank in ended])

    # -- what clients ask for ------------------------------------------------------------------------------------------

    async def stacks(self, rank: int | None, save_as: str = "") -> list[ProcessStacks]:
        """Return the stacks of what runs now, and of the processes that it has started: ``TakeStacks``."""
        ranks = [own_rank for own_rank in self.ranks if rank in (None, own_rank.rank)]
        taken = await self._stacks.take(ranks, _STACKS_TIMEOUT)
        if save_as and ranks and ranks[0].directory is not None:
            self._stacks.add(ranks[0].directory.parent, taken, save_as)
        return taken

    async def profile(self, ranks: Collection[int], seconds: float, idle: bool) -> list[RankProfile]:
        """Return profiles of the ranks that run now, of those with these global ranks if any are given."""
        from torchx_monarch.host.ranks.rank_stacks import profile

        chosen = [rank for rank in self.ranks if not ranks or rank.rank in ranks]
        return await profile(chosen, self._replica, seconds, idle)

    async def samples(self) -> RankSamples:
        """Return a sample of each rank of the attempt."""
        from torchx_monarch.host.ranks.rank_samples import take_samples

        attempt = 0 if self.world is None else self.world.attempt
        return await take_samples(self.ranks, attempt, self._replica, self._hostname, self._marker, self._disk)

    @functools.cached_property
    def _stacks(self) -> RankStacks:
        from torchx_monarch.host.ranks.rank_stacks import RankStacks

        return RankStacks(self._replica, self._hostname, self._marker, self._disk)

    # -- ends ----------------------------------------------------------------------------------------------------------

    async def _signal(self, ranks: Sequence[Rank], number: int) -> None:
        """Send a signal to what still runs; but for SIGKILL, to what has got none before.

        Evidence is written before. What a rank does meanwhile, it does after the decision to stop it.
        """

        def due() -> list[Rank]:
            return [
                rank
                for rank in ranks
                if rank.is_running and (not rank.signal or number == signal.SIGKILL != rank.signal)
            ]

        for rank in due():
            rank.stopped_at = rank.stopped_at or time.time()
        await self._write_evidence(due(), number)
        for rank in due():
            rank.signal = number
            rank.kill(signal.SIGKILL if number == signal.SIGTERM and self._ignores_sigterm(rank) else number)

    def _ignores_sigterm(self, rank: Rank) -> bool:
        """Return whether a rank ignores SIGTERM until its host tells it to end (``training.steps``)."""
        return False

    async def _write_evidence(self, ranks: Sequence[Rank], number: int) -> None:
        """Write what explains where processes are, before they get a signal."""

    async def _clear_up(self, ranks: Sequence[Rank]) -> list[int]:
        """End the processes that ranks have left behind, and read the output of those that have ended to its end.

        Return the processes that SIGKILL does not end.
        """
        async with self._clearing:
            # Otherwise a new attempt has started.
            left = await end_orphans(self._marker, [rank.pid for rank in ranks]) if ranks is self.ranks else []
            await asyncio.gather(*(rank.drain() for rank in ranks if not rank.is_running))
        return left

    def _read_exit(self, rank: Rank, traceback_bytes: int) -> RankExit:
        """Return the exit of a process with what its files say."""
        error: dict[str, Any] | None = None
        if rank.error_file:
            try:
                error = error_files.read(rank.error_file, traceback_bytes)
            except error_files.UnreadableError as unreadable:
                error = {"message": f"its error file is unreadable: {unreadable}"}
        return self._exit_of(rank, error)

    def _exit_of(self, rank: Rank, error: dict[str, Any] | None = None) -> RankExit:
        assert rank.returncode is not None
        code = rank.returncode
        if code == -signal.SIGKILL and rank.signal == signal.SIGTERM and self._ignores_sigterm(rank):
            code = -signal.SIGTERM  # as by SIGTERM, in place of which it has got SIGKILL
        last_line = b""
        if error is None and rank.returncode > 0:
            last_line = rank.stderr.last_line or rank.stdout.last_line
        killed = rank.returncode == -signal.SIGKILL and rank.stopped_at is None
        exit = RankExit(
            rank=rank.rank,
            local_rank=rank.local_rank,
            replica=self._replica,
            hostname=self._hostname,
            pid=rank.pid,
            code=code,
            time=rank.ended_at,
            stopped_at=rank.stopped_at,
            stderr_path=str(rank.directory / "stderr.log") if rank.directory else "",
            error=error,
            started=rank.started,
            out_of_memory=self._memory.evidence() if killed else "",
            last_output=one_line(last_line.decode(errors="replace"), _MAX_LINE),
            timer=rank.timer,
            grouped=rank.grouped,
            failure_reported_at=rank.failure[0] if rank.failure else None,
        )
        if exit.failed and rank.stopped_at is not None and exit.code < 0:
            # The signal hit an interpreter that was exiting; after an exception, its exit code would have been 1.
            return dataclasses.replace(exit, code=rank.failure[1] if rank.failure else 1)
        return exit


async def _until_ended(ranks: Sequence[Rank], timeout: float) -> None:
    """Wait until the processes of ranks have ended, at most so many seconds."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(rank.wait() for rank in ranks)), timeout)
