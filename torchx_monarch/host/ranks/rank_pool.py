# SPDX-License-Identifier: BSD-3-Clause
"""Launch the attempts of the ranks of one run on one host, and keep evidence of ranks that are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchx_monarch.host.ranks import flight_recorders
from torchx_monarch.host.ranks.flight_recorders import FlightRecorders
from torchx_monarch.host.ranks.master_store import MasterEndpoint
from torchx_monarch.host.ranks.process_pool import ProcessPool
from torchx_monarch.host.ranks.rank_logs import RankLogs
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.ranks.rank_samples import prepare_progress, read_progress
from torchx_monarch.host.ranks.rank_starter import RankStarter
from torchx_monarch.host.ranks.run_spec import rank_environment
from torchx_monarch.host.ranks.step_memory import StepMemory
from torchx_monarch.host.ranks.timers import FILE, TimerServer
from torchx_monarch.insight.group_calls import group_calls
from torchx_monarch.insight.hangs import RankCollectives
from torchx_monarch.insight.pace import HostPace, RankPace
from torchx_monarch.insight.rank_sample import Progress, RankSamples, StepsRead, steps_done
from torchx_monarch.model.env_names import INTERFACE, THIS_JOB
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.model.world import LaunchError, World
from torchx_monarch.system import process_status, processes, run_dirs
from torchx_monarch.system.cgroups import OutOfMemory
from torchx_monarch.system.console import WriterThread
from torchx_monarch.training import steps
from torchx_monarch.training.checkpoint import MEMORY

_COLLECTIVES_TIMEOUT = 1.0
"""Seconds for a rank to tell the state of its collectives. It takes milliseconds, unless it is stopped or holds the
GIL."""


class RankPool(ProcessPool):
    """Start, watch and stop the ranks of a run on one host.

    Methods that start something raise ``LaunchError`` if it cannot be started; the message gives the reason.
    ``on_first_output`` is called when a rank first prints, once for each of its streams. ``ends_at`` is the known end
    of the job, in seconds since the epoch; 0 if there is none.

    Attributes:
        checkpoints: the folder for the ranks' checkpoints; empty for none.
    """

    def __init__(
        self,
        logs: RankLogs,
        starter: RankStarter,
        recorders: FlightRecorders,
        disk: WriterThread,
        attach_socket: str,
        say: Callable[[str], None],
        on_first_output: Callable[[], None],
        ends_at: float = 0.0,
    ) -> None:
        super().__init__(logs.replica, logs.hostname, logs.run.environ.get(processes.MARKER, ""), disk)
        self.run = logs.run
        self.starter = starter
        self._logs = logs
        self._recorders = recorders
        self._attach_socket = attach_socket
        self._say = say
        self._on_first_output = on_first_output
        self._timers: TimerServer | None = None
        self._is_retired = False
        self._ends_at = ends_at
        self._steps: StepMemory | None = None
        self.checkpoints = ""

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
        """End the timers and the store, or release the port that is reserved for one; ranks run on."""
        if self._timers is not None:
            self._timers.close()
            self._timers = None
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self.starter.store.close()

    def retire(self) -> None:
        """Close the pool at the end of its run."""
        self.close()
        self.ranks = []
        self._is_retired = True

    # -- an attempt ----------------------------------------------------------------------------------------------------

    async def serve_store(self, bind: str, advertised: str, hosts: int) -> tuple[str, int, bool]:
        """Open the port where the ranks meet, on rank 0's host (``OpenStore``)."""
        endpoint = await MasterEndpoint.create(self.run.command.options, bind, advertised, hosts)
        zygote = await self.starter.importer()
        serves = zygote is not None and "torch" in self.starter.versions
        port, served = await self.starter.store.open(endpoint, serves)
        if self._is_retired:  # the run has ended meanwhile
            self.starter.store.close()
        return endpoint.address, port, served

    async def launch(self, world: World) -> list[int]:
        """Start the program of each rank of an attempt; return the process ids, in the order of local ranks."""
        store = self.starter.store
        if store.current is not None and store.current.port != world.master_port:
            store.close()  # the ranks meet on another host
        if self._timers is not None:
            self._timers.clear()
        try:
            os.getcwd()
        except FileNotFoundError:
            raise LaunchError(f"the working folder is gone: {os.readlink('/proc/self/cwd')}") from None
        if self._steps is not None:
            self._steps.close()
        self._steps = StepMemory(self.starter.count, self._ends_at)
        stops = self._stops
        await self.starter.renew_importer()
        try:
            with contextlib.ExitStack() as unstarted:
                ranks = await self._disk.run(self._prepare_files, world, unstarted)
                if stops != self._stops:  # the attempt has ended while the modules were imported, or the disk was slow
                    raise LaunchError("the ranks were stopped before they were started")
                if ranks:
                    await self.starter.start([(rank, self._describe(world, rank)) for rank in ranks])
                if stops != self._stops:
                    raise LaunchError("the ranks were stopped while they were started")
                unstarted.pop_all()
        except OSError as error:
            what = f"write the ranks' logs in {error.filename}" if error.filename else "start the ranks"
            raise LaunchError(f"cannot {what}: {error.strerror}{processes.limit_hint(error)}") from None
        except ValueError as error:
            raise LaunchError(str(error)) from None
        self.ranks, self.world = ranks, world
        self._memory = OutOfMemory()
        return [rank.pid for rank in ranks]

    @property
    def uses_steps(self) -> bool:
        return self._steps is not None and self._steps.is_used

    def _ignores_sigterm(self, rank: Rank) -> bool:
        return self._steps is not None and self._steps.ignores_sigterm(rank.local_rank)

    async def stop_at_step(self, target: int, *, confirmed: bool, seconds: float) -> StepsRead:
        """Have the ranks come to an agreed stop: ``StopAtStep``."""
        if self._steps is None:
            return StepsRead()
        return await self._steps.stop(self.ranks, target, confirmed=confirmed, seconds=seconds)

    async def collectives(self) -> list[RankCollectives]:
        """Return the state of the collectives of the ranks that run now."""
        ranks = self.ranks
        answers = await flight_recorders.status([rank for rank in ranks if rank.is_running], _COLLECTIVES_TIMEOUT)
        now = time.time()
        return [
            RankCollectives(rank.rank, now, answers.get(rank.pid), rank.kernel_wait(), rank.last_active)
            for rank in ranks
            if rank.is_running
        ]

    async def pace(self, collectives: Sequence[RankCollectives], seconds: float, calls: int) -> HostPace:
        """Return what these ranks have done until now, and called in the last so many seconds: ``ReadCollectives``."""
        running = {rank.rank: rank for rank in self.ranks if rank.is_running}
        ranks = [running[found.rank] for found in collectives if found.rank in running]

        def read() -> list[RankPace]:
            found = []
            for rank in ranks:
                reported = self._with_steps(rank.local_rank, read_progress(rank.directory), time.time())
                step = reported.step if reported is not None else None
                found.append(RankPace(rank.rank, step, process_status.seconds_runnable(rank.pid)))
            return found

        now, reading = time.time(), asyncio.ensure_future(self._disk.run(read))
        await asyncio.wait([reading], timeout=_COLLECTIVES_TIMEOUT)
        if not reading.done():  # nor is anything known of a rank that does not answer
            reading.cancel()
            return HostPace()
        groups = {found.rank: found.groups or () for found in collectives}
        return HostPace(now, tuple(reading.result()), group_calls(groups, now, calls, now - seconds))

    async def _write_evidence(self, ranks: Sequence[Rank], number: int) -> None:
        """Write stacks and last collectives of ranks into the folder of their attempt, before they get a signal."""
        running = [rank for rank in ranks if rank.is_running]
        if running and running[0].directory is not None:
            collecting = asyncio.ensure_future(flight_recorders.collect(running))
            await self._stacks.write_before(number, running, running[0].directory.parent)
            await collecting

    def _prepare_files(self, world: World, unstarted: contextlib.ExitStack) -> list[Rank]:
        """Return the ranks of an attempt, with their folders and the destinations of their output."""
        ranks = []
        for local_rank in range(self.starter.count):
            number = world.place(self._replica).first_rank + local_rank
            rank = Rank(number, local_rank, self._on_first_output)
            unstarted.callback(rank.discard)
            rank.directory = self._logs.attach(rank.stdout, rank.stderr, world.log_attempt, number, local_rank)
            if rank.directory is not None:
                rank.error_file = str(rank.directory / "error.json")
                run_dirs.remove_tree(rank.error_file)
                prepare_progress(rank.directory)
            ranks.append(rank)
        return ranks

    def _describe(self, world: World, rank: Rank) -> dict[str, Any]:
        run, program, local_rank = self.run, self.run.command.program_of(rank.local_rank), rank.local_rank
        env = rank_environment(world, run.command.options, self._replica, local_rank, run.environ, rank.error_file)
        if self._timers is not None:
            env[FILE] = self._timers.path
        if self._steps is not None:
            env[steps.VARIABLE] = self._steps.variable(local_rank)
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
                **({MEMORY: self.checkpoints} if self.checkpoints else {}),
                **env,
            },
            "recorder": self._recorders.path,
            "breakpoints": self._attach_socket,
        }

    def _read_exit(self, rank: Rank, traceback_bytes: int) -> RankExit:
        exit = super()._read_exit(rank, traceback_bytes)
        found = self._with_steps(rank.local_rank, read_progress(rank.directory, is_end=True), exit.time)
        return exit if found is None else dataclasses.replace(exit, steps=steps_done(found, exit.started, exit.time))

    async def samples(self) -> RankSamples:
        found = await super().samples()
        ranks = [
            dataclasses.replace(sample, progress=self._with_steps(sample.local_rank, sample.progress, sample.time))
            for sample in found.ranks
        ]
        return dataclasses.replace(found, ranks=tuple(ranks))

    def _with_steps(self, local_rank: int, reported: Progress | None, now: float) -> Progress | None:
        return reported if self._steps is None else self._steps.progress(local_rank, reported, now)
