# SPDX-License-Identifier: BSD-3-Clause
"""Manage the ranks of one run on one host: launch their attempts, watch and stop them, with exact exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torchx_monarch.host.ranks.flight_recorders import FlightRecorders
from torchx_monarch.host.ranks.master_store import MasterEndpoint
from torchx_monarch.host.ranks.out_of_memory import OutOfMemory
from torchx_monarch.host.ranks.rank_output import RankLogs
from torchx_monarch.host.ranks.rank_process import Rank, RankProcess, end_orphans
from torchx_monarch.host.ranks.rank_profiles import profile
from torchx_monarch.host.ranks.rank_samples import prepare_progress, read_progress, take_samples
from torchx_monarch.host.ranks.rank_stacks import RankStacks
from torchx_monarch.host.ranks.rank_starter import RankStarter
from torchx_monarch.host.ranks.run_spec import INTERFACE, rank_environment
from torchx_monarch.host.ranks.timers import FILE, TimerServer
from torchx_monarch.insight.hangs import RankCollectives
from torchx_monarch.insight.profile import RankProfile
from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.insight.stacks import ProcessStacks
from torchx_monarch.model.env_names import THIS_JOB
from torchx_monarch.model.job_result import EARLY_FAILURES_WITHIN, RankExit
from torchx_monarch.model.world import LaunchError, World
from torchx_monarch.system import error_files, open_files, processes, run_dirs
from torchx_monarch.system.untrusted_text import one_line
from torchx_monarch.transport import messages

_STACKS_TIMEOUT = 3.0
"""Seconds for the processes of a rank to write their stacks, when a client asks for them."""

_COLLECTIVES_TIMEOUT = 1.0
"""Seconds for a rank to tell the state of its collectives. It takes milliseconds, unless it is stopped or holds the
GIL."""

_MAX_LINE = 300
"""Characters of a rank's last output in its exit."""


class RankPool:
    """Start, watch and stop the ranks of a run on one host.

    Methods that start something raise ``LaunchError`` if it cannot be started; the message gives the reason.
    ``attempt`` is the number of the last attempt that was launched, -1 for none. ``on_first_output`` is called when a
    rank first prints, once for each of its streams.
    """

    def __init__(
        self,
        logs: RankLogs,
        starter: RankStarter,
        recorders: FlightRecorders,
        attach_socket: str,
        say: Callable[[str], None],
        on_first_output: Callable[[], None],
    ) -> None:
        self.attempt = -1
        self.run = logs.run
        self._replica = logs.replica
        self._logs = logs
        self.starter = starter
        self._recorders = recorders
        self._attach_socket = attach_socket
        self._say = say
        self._on_first_output = on_first_output
        self._timers: TimerServer | None = None
        self._ranks: list[Rank] = []
        self._is_retired = False
        self._stops = 0
        self._memory = OutOfMemory()
        self._clearing = asyncio.Lock()
        self._marker = logs.run.environ.get(processes.MARKER, "")
        self._stacks = RankStacks(logs.replica, logs.hostname, self._marker)

    async def start(self, nproc: str) -> int:
        """Prepare for the ranks (see ``RankStarter.prepare``) and return their number on this host."""
        await self._recorders.start()
        return await self.starter.prepare(nproc)

    def start_timers(self, path: str) -> None:
        try:
            self._timers = TimerServer(path, self._marker, self._say)
        except OSError as error:
            raise LaunchError(f"cannot make the pipe of torch's timers: {error.strerror}: {path}") from None

    def close(self) -> None:
        """End the timers and release the reserved port; ranks run on."""
        if self._timers is not None:
            self._timers.close()
            self._timers = None
        self.starter.store.release()

    def retire(self) -> None:
        """Close the pool, and the store of its ranks, at the end of its run."""
        self.close()
        self._ranks = []
        self._is_retired = True
        self.starter.store.end()

    # -- an attempt ----------------------------------------------------------------------------------------------------

    async def serve_store(self, bind: str, advertised: str, hosts: int) -> tuple[str, int, bool]:
        """Open the port where the ranks meet, on rank 0's host (``OpenStore``)."""
        endpoint = await MasterEndpoint.create(self.run.command.options, bind, advertised, hosts)
        port, served = await self.starter.open_store(endpoint)
        if self._is_retired:  # the run has ended meanwhile
            self.starter.store.end()
        return endpoint.address, port, served

    async def launch(self, world: World) -> list[int]:
        """Start the program of each rank of an attempt; return the process ids, in the order of local ranks."""
        store = self.starter.store
        if store.current is not None and store.current.port != world.master_port:
            store.end()  # the ranks meet on another host
        if self._timers is not None:
            self._timers.clear()
        stops = self._stops
        await self.starter.renew_importer()
        if stops != self._stops:  # the attempt has ended while the modules were imported
            raise LaunchError("the ranks were stopped before they were started")
        try:
            with contextlib.ExitStack() as unstarted:
                ranks = [self._assign(world, local_rank, unstarted) for local_rank in range(self.starter.count)]
                if ranks:
                    await self.starter.start([(rank.process, self._describe(world, rank)) for rank in ranks])
                unstarted.pop_all()
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            reason = f"cannot write the ranks' logs: {error.strerror}{where}{open_files.hint(error)}"
            raise LaunchError(reason) from None
        except ValueError as error:
            raise LaunchError(str(error)) from None
        if stops != self._stops:
            for rank in ranks:
                rank.process.discard()
            raise LaunchError("the ranks were stopped while they were started")
        self._ranks, self.attempt = ranks, world.attempt
        self._recorders.expect({rank.process.pid: rank.directory for rank in ranks})
        self._memory = OutOfMemory()
        return [rank.process.pid for rank in ranks]

    async def watch(self) -> None:
        """Show the ranks' output, and wait until a rank has failed or all have ended; then send SIGTERM to the others.

        After an early failure (``RankExit.is_early``) the others have a moment to fail as well.

        The controller calls this after its progress line about the launch, which thus precedes the output.
        """
        ranks = self._ranks
        for rank in ranks:
            rank.process.release()
        running = {asyncio.ensure_future(rank.process.ended.wait()): rank for rank in ranks}
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [running.pop(task) for task in done]
            if failed := [rank for rank in ended if rank.process.returncode != 0]:
                if running and all(self._exit_of(rank).is_early for rank in failed):
                    await asyncio.wait(running, timeout=EARLY_FAILURES_WITHIN)
                for task in running:
                    task.cancel()
                # The controller then stops those of the other hosts, and waits for all.
                await self._stop_running(ranks, signal.SIGTERM)
                return
        await self._clear_up(ranks)

    async def stop(self, number: int, grace: float) -> None:
        """Send a signal to every rank, and SIGKILL after ``grace`` seconds; return when all have ended.

        End all processes that the ranks have started. A rank that is already shutting down gets SIGKILL only. Without
        ranks nothing happens.
        """
        ranks = self._ranks
        self._stops += 1
        if not ranks:
            return
        for rank in ranks:
            rank.process.release()
        left = await self._stop_running(ranks, number)
        if left:
            ends = [asyncio.ensure_future(rank.process.ended.wait()) for rank in left]
            await asyncio.wait(ends, timeout=grace)
        if number != signal.SIGKILL:
            await self._write_evidence(left, signal.SIGKILL)  # where they are at the end of the grace period
        for rank in left:
            if rank.is_running:
                rank.process.kill(signal.SIGKILL)
        await self._clear_up(ranks)

    async def stacks(self, rank: int | None, save_as: str = "") -> list[ProcessStacks]:
        """Return the stacks of the ranks that run now, and of the processes that they have started: ``TakeStacks``."""
        ranks = [own_rank for own_rank in self._ranks if rank in (None, own_rank.rank)]
        taken = await self._stacks.take(ranks, _STACKS_TIMEOUT)
        if save_as and ranks and ranks[0].directory is not None:
            self._stacks.add(ranks[0].directory.parent, taken, save_as)
        return taken

    async def profile(self, ranks: Collection[int], seconds: float, idle: bool) -> list[RankProfile]:
        """Return profiles of the ranks that run now, of those with these global ranks if any are given."""
        chosen = [rank for rank in self._ranks if not ranks or rank.rank in ranks]
        return await profile(chosen, self._replica, seconds, idle)

    async def collectives(self) -> list[RankCollectives]:
        """Return the state of the collectives of the ranks that run now."""
        ranks = self._ranks
        running = [rank.process.pid for rank in ranks if rank.is_running]
        answers = await self._recorders.status(running, _COLLECTIVES_TIMEOUT)
        now = time.time()
        return [RankCollectives(rank.rank, now, answers.get(rank.process.pid)) for rank in ranks if rank.is_running]

    async def samples(self) -> list[RankSample]:
        """Return a sample of each rank of the attempt."""
        return await take_samples(self._ranks, self._replica, self._logs.hostname, self._marker, self._recorders)

    async def _stop_running(self, ranks: Sequence[Rank], number: int) -> list[Rank]:
        """Signal the ranks that still run, each once unless by SIGKILL; return all ranks that still run.

        Their stacks are written before. What a rank does meanwhile, it does after the decision to stop it.
        """
        left = [rank for rank in ranks if rank.is_running]
        signalled = [rank for rank in left if not rank.is_signalled or number == signal.SIGKILL]
        for rank in signalled:
            rank.stopped_at = rank.stopped_at or time.time()
        await self._write_evidence(signalled, number)
        for rank in signalled:
            if rank.is_running and (not rank.is_signalled or number == signal.SIGKILL):
                rank.is_signalled = True
                rank.process.kill(number)
        return [rank for rank in left if rank.is_running]

    async def _write_evidence(self, ranks: Sequence[Rank], number: int) -> None:
        """Write stacks and last collectives of ranks into the folder of their attempt, before they get a signal."""
        running = [rank for rank in ranks if rank.is_running]
        if running and running[0].directory is not None:
            collecting = asyncio.ensure_future(self._recorders.collect([rank.process.pid for rank in running]))
            await self._stacks.write_before(number, running, running[0].directory.parent)
            await collecting

    def notify(self, number: int) -> None:
        """Send a signal to the rank processes but not to their process groups; the ranks do not count as stopped."""
        for rank in self._ranks:
            if rank.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def exits(self) -> list[RankExit]:
        """Return the exits of the ranks of this attempt that have ended."""
        return [self._exit_of(rank) for rank in self._ranks if not rank.is_running]

    def _assign(self, world: World, local_rank: int, unstarted: contextlib.ExitStack) -> Rank:
        rank = world.first_rank(self._replica) + local_rank
        process = RankProcess(self._on_first_output)
        unstarted.callback(process.discard)
        directory = self._logs.attach(process.stdout, process.stderr, world.log_attempt, rank, local_rank)
        return Rank(process, rank, local_rank, directory, world.attempt)

    def _describe(self, world: World, rank: Rank) -> dict[str, Any]:
        run, program, error_file = self.run, self.run.command.program_of(rank.local_rank), ""
        if rank.directory is not None:
            error_file = str(rank.directory / "error.json")
            run_dirs.remove_tree(error_file)
            prepare_progress(rank.directory)
        env = rank_environment(world, run.command.options, self._replica, rank.local_rank, run.environ, error_file)
        if self._timers is not None:
            env[FILE] = self._timers.path
        return {
            **({"cwd": run.cwd} if run.cwd is not None else {}),
            "mode": program.mode,
            "target": program.target,
            "args": list(program.args),
            # The zygote may have started before the host knew the interface.
            "env": {
                **{name: value for name, value in run.environ.items() if name == INTERFACE},
                **({THIS_JOB: self._attach_socket} if THIS_JOB not in run.environ else {}),  # a script has another one
                **run.added,
                **env,
            },
            "recorder": self._recorders.path,
            "breakpoints": self._attach_socket,
        }

    async def _clear_up(self, ranks: Sequence[Rank]) -> None:
        """End the processes that the ranks, which have ended, have left behind, and read all output to its end."""
        for rank in ranks:
            await rank.process.cleared.wait()
        async with self._clearing:
            if ranks is self._ranks:  # otherwise a new attempt has started
                # Ranks of other hosts may still be shutting down and need the store.
                await end_orphans(self._marker, self.starter.pids)
            for rank in ranks:
                await rank.process.drain()

    def _exit_of(self, rank: Rank) -> RankExit:
        error: dict[str, Any] | None = None
        if rank.directory is not None:
            try:
                # All exits of a host must fit into one message.
                limit = min(error_files.TRACEBACK_BYTES, messages.MAX_LINE // (4 * len(self._ranks)))
                error = error_files.read(str(rank.directory / "error.json"), traceback_bytes=limit)
            except error_files.UnreadableError as failure:
                error = {"message": f"its error file is unreadable: {failure}"}
        process, progress = rank.process, read_progress(rank.directory, is_end=True)
        assert process.returncode is not None
        last_line = b""
        if error is None and process.returncode > 0:
            last_line = process.stderr.last_line or process.stdout.last_line
        killed = process.returncode == -signal.SIGKILL and rank.stopped_at is None
        reported = self._recorders.failed.get(process.pid)
        exit = RankExit(
            rank=rank.rank,
            local_rank=rank.local_rank,
            replica=self._replica,
            hostname=self._logs.hostname,
            pid=process.pid,
            code=process.returncode,
            time=process.ended_at,
            stopped_at=rank.stopped_at,
            stderr_path=str(rank.directory / "stderr.log") if rank.directory else "",
            error=error,
            timer=self._timers.expired.get(process.pid, "") if self._timers else "",
            started=rank.started,
            out_of_memory=self._memory.evidence() if killed else "",
            step=progress.step if progress is not None else None,
            grouped=self._recorders.grouped.get(process.pid),
            failure_reported_at=reported[0] if reported else None,
            last_output=one_line(last_line.decode(errors="replace"), _MAX_LINE),
        )
        if exit.failed and rank.stopped_at is not None and exit.code < 0:
            # The signal hit an interpreter that was exiting; after an exception, its exit code would have been 1.
            return dataclasses.replace(exit, code=reported[1] if reported else 1)
        return exit
