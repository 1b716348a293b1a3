# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Manage the rank processes of one host: spare interpreters first, then programs with exact exit codes.

They are children of the host process, which exists before the mesh: so they import torch while the mesh forms. The
controller reaches them through the agent actor, which runs in a separate process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from torchx_monarch.command.command import Command, Program
from torchx_monarch.host.filtered_output import FilteredFile, filtered_name
from torchx_monarch.host.master_endpoint import EndpointError, MasterEndpoint
from torchx_monarch.host.master_store import MasterStore
from torchx_monarch.host.orphan_reaper import end_orphans
from torchx_monarch.host.out_of_memory import OutOfMemory
from torchx_monarch.host.rank_environment import interpreter_environment, rank_environment
from torchx_monarch.host.rank_process import RankProcess
from torchx_monarch.host.watchdog import FILE, Watchdog, WatchdogError
from torchx_monarch.insight.run_log import RunLog, RunLogSink, SinkGroup
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.model.world import LaunchError, World
from torchx_monarch.system import error_files, open_files, processes, safe_files
from torchx_monarch.system.console import Console, LineSink
from torchx_monarch.transport import messages

_SPARES_AFTER = 5.0
"""Seconds from a launch to the start of spare interpreters, which must not slow down the start of the ranks."""


@dataclasses.dataclass(frozen=True)
class HostContext:
    """Identify a host and the destinations of its ranks' output.

    Attributes:
        replica: id of the host's replica.
        hostname: name of the machine.
        log_dir: folder for ``attempt_N/RANK/{stdout,stderr}.log`` and ``error.json``; None for no files.
        stdout: output for prefixed stdout lines; None to drop them.
        stderr: output for prefixed stderr lines; None to drop them.
        run_log: second destination of these lines, in a run on a live allocation; None in a batch job.
    """

    replica: int
    hostname: str
    log_dir: str | None
    stdout: Console | None = None
    stderr: Console | None = None
    run_log: RunLog | None = None


@dataclasses.dataclass
class Rank:
    """Represent one rank of the current attempt.

    Attributes:
        directory: folder of the rank's logs and error file; None for no files.
        stopped_at: time of the first signal to stop, in seconds since the epoch; None if none was sent.
    """

    interpreter: RankProcess
    rank: int
    local_rank: int
    directory: Path | None
    stopped_at: float | None = None
    started: float = dataclasses.field(default_factory=time.time)


class RankPool:
    """Start, watch and stop the ranks of one host.

    Attributes:
        attempt: number of the last attempt that was launched; -1 for none.
        limits: limit of open files (None for that of this process) and umask of the ranks.

    Args:
        command: command of the role.
        context: the host and the destinations of its ranks' output.
        environ: environment of the role.
        preload: modules that spare interpreters of a torchrun command import.
        on_first_output: called once, when a rank first prints.
        say: called with a progress line.
        limits: ``limits`` of an earlier pool, which has already changed this process's own; None for the first pool.
    """

    def __init__(
        self,
        command: Command,
        context: HostContext,
        environ: Mapping[str, str],
        preload: Sequence[str],
        on_first_output: Callable[[], None],
        say: Callable[[str], None],
        limits: tuple[tuple[int, int] | None, int] | None = None,
    ) -> None:
        self._command = command
        self._context = context
        self._environ = environ
        self._preload = list(preload) if command.kind == "torchrun" and command.program.mode != "exec" else []
        self._on_first_output: Callable[[], None] | None = on_first_output
        self._say = say
        self._retired = False
        self.attempt = -1
        self._watchdog: Watchdog | None = None
        self._count = 0
        self._waiting: list[RankProcess] = []
        self._ranks: list[Rank] = []
        self._spares: asyncio.Task[None] | None = None
        self._store = MasterStore(say)
        self._memory = OutOfMemory()
        # Files of this process and of Monarch's processes are private to the user; ranks keep the user's umask.
        self.limits = limits or (processes.raise_file_limit(), os.umask(0o077))

    # -- before an attempt ---------------------------------------------------------------------------------------------

    async def start(self, nproc: str) -> int:
        """Start the interpreters; return while they import their modules.

        Args:
            nproc: a number, or auto, cpu, gpu or xpu, which torch resolves in the first interpreter.

        Returns:
            the number of ranks on this host.

        Raises:
            LaunchError: an interpreter cannot be started, torch rejects the name, or the open file limit is too low.
        """
        if (node_rank := self._command.options.node_rank) not in (0, self._context.replica):
            self._say(f"--node-rank={node_rank} is not used: this is the host of replica {self._context.replica}")
        if nproc.isdigit():
            self._count = int(nproc)
            self._inherit()
        else:
            self._count = 2  # unknown as yet: the first interpreter gets the environment of several ranks
            self._inherit()
            if not self._waiting:
                self._start(0)
            answer = await self._waiting[0].ask({"op": "count", "device": nproc}) or {"error": "the interpreter ended"}
            if "error" in answer:
                raise LaunchError(f"--nproc-per-node={nproc} cannot be resolved on this host: {answer['error']}")
            self._count = int(answer["count"])
            if self._count < 1:
                reason = f"--nproc-per-node={nproc} gives {self._count} ranks on this host; 1 or more are needed"
                raise LaunchError(reason)
        if too_few := open_files.shortage(self._count):
            raise LaunchError(too_few)
        self._start_missing()
        return self._count

    async def serve_store(self, bind: str, advertised: str, hosts: int) -> tuple[str, int, bool]:
        """Open the port where the ranks meet, on rank 0's host.

        Args:
            bind: local address of the port unless the user gives another; empty for all.
            advertised: address by which the ranks of all hosts reach this host.
            hosts: number of hosts that take part.

        Returns:
            MASTER_ADDR, MASTER_PORT, and whether a store is already served there.

        Raises:
            LaunchError: an interpreter cannot be started, or the endpoint cannot be opened.
        """
        self._start_missing()
        try:
            endpoint = await MasterEndpoint.of(self._command.options, bind, advertised, hosts)
            if endpoint.unused and self.attempt < 0:
                self._say(f"--master-addr={endpoint.unused} is not used: the ranks meet at {advertised}, replica 0's")
            port, served = await self._store.open(endpoint, self._waiting[0] if self._preload else None)
        except EndpointError as error:
            raise LaunchError(str(error)) from None
        return endpoint.address, port, served

    def start_watchdog(self, path: str, run_id: str, tell: Callable[[str], None]) -> None:
        """Start the timer server of the ranks; see ``Watchdog`` for the arguments.

        Raises:
            OSError: the server's process cannot be started.
        """
        env = interpreter_environment(self._environ, self._count)
        self._watchdog = Watchdog(self._python(), path, run_id, env, tell)

    def close(self) -> None:
        """End the timer server and release the reserved port; ranks and spare interpreters run on."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        self._store.release()

    def _start_command(self, program: Program) -> list[str]:
        """Return the interpreter that starts a rank's process: the program's, or a bare one that execs it later."""
        options = self._command.options
        # Only torch can resolve the number of ranks and the CPUs, even if the program is not Python.
        asks_torch = options.numa_binding is not None or not options.nproc_per_node.isdigit()
        ahead = program.mode != "exec" and self._preload
        return self._python() if ahead or asks_torch else [sys.executable, "-I", "-S"]

    def _exec_command(self, program: Program) -> list[str]:
        """Return the interpreter that a rank's process execs when its rank is known; empty if it execs none.

        An interpreter without preload modules starts with the rank's whole environment, as under torchrun, so that code
        that runs before the program (sitecustomize, .pth files) sees it.
        """
        return [] if program.mode == "exec" or self._preload else self._python()

    def _is_found(self, python: str) -> bool:
        relative = os.sep in python and not os.path.isabs(python)  # resolved later, in the program's folder
        return relative or shutil.which(python, path=self._environ.get("PATH")) is not None

    def _start_folder(self) -> str | None:
        """Return the folder in which interpreters start; None for that of the host process."""
        return None

    def _python(self) -> list[str]:
        typed = list(self._command.interpreter) or ["python"]
        if typed[0] in ("python", "python3"):
            # The host's own interpreter, as under torchrun; PATH may have another `python`, or none.
            typed[0] = sys.executable
        return [*typed, "-u"]

    def _start_missing(self) -> None:
        for local_rank in range(len(self._waiting), self._count):
            self._start(local_rank)

    def _start(self, local_rank: int) -> None:
        program = self._command.program_of(local_rank)
        python = self._start_command(program)
        env = interpreter_environment(self._base_environ(), self._count)
        if (later := self._exec_command(program)) and not self._is_found(later[0]):
            raise LaunchError(f"cannot start the Python interpreter {later[0]!r}: {os.strerror(errno.ENOENT)}")
        folder = self._start_folder()
        try:
            interpreter = RankProcess(python, self._label(program), env, *self.limits, folder, self._printed)
        except OSError as error:
            raise LaunchError(
                f"cannot start the Python interpreter {python[0]!r}: {error.strerror}{open_files.hint(error)}"
            ) from None
        self._prepare(interpreter, program, local_rank)
        self._waiting.append(interpreter)

    def _base_environ(self) -> Mapping[str, str]:
        return self._environ

    def _spare_pids(self) -> list[int]:
        """Return the process ids of the spare interpreters."""
        return [one.process.pid for one in self._waiting]

    def _inherit(self) -> None:
        """Take over spare interpreters of an earlier pool; overridden by ``SessionPool``."""

    def _label(self, program: Program) -> list[str]:
        return _program_argv(program)

    def _prepare(self, interpreter: RankProcess, program: Program, local_rank: int) -> None:
        interpreter.prepare(program.mode, program.target, self._preload)
        self._bind(interpreter, local_rank)

    def _bind(self, interpreter: RankProcess, local_rank: int) -> None:
        if self._command.options.numa_binding is not None:
            interpreter.bind(self._command.options.numa_binding, local_rank)

    def _printed(self) -> None:
        if self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None

    # -- an attempt ----------------------------------------------------------------------------------------------------

    async def launch(self, world: World, spares: bool) -> list[int]:
        """Assign a rank to each interpreter and start the program in it.

        Args:
            world: the ranks of the attempt.
            spares: whether to start spare interpreters for another attempt.

        Returns:
            the process ids, in the order of local ranks.

        Raises:
            LaunchError: an interpreter cannot be started or bound to CPUs, the timer server does not run, a log file
                cannot be opened, or there are fewer visible devices than ranks.
        """
        self._start_missing()
        if self._store.port != world.master_port:
            self._store.move_away()
        try:
            if self._watchdog is not None:
                await self._watchdog.ready()
        except WatchdogError as error:
            raise LaunchError(f"torch's timer server does not run: {error}") from None
        interpreters = self._waiting[: self._count]
        for local_rank, interpreter in enumerate(interpreters):
            if why := await interpreter.binding_error():
                binding = self._command.options.numa_binding
                reason = f"local rank {local_rank} has no CPUs near GPU {local_rank}: {why}"
                raise LaunchError(f"--numa-binding={binding}: {reason}")
        try:
            self._ranks = [self._assign(world, number, each) for number, each in enumerate(interpreters)]
            orders = [self._order(world, rank) for rank in self._ranks]
        except OSError as error:
            raise LaunchError(
                f"cannot write the ranks' logs: {error.strerror}: {error.filename}{open_files.hint(error)}"
            ) from None
        except ValueError as error:
            raise LaunchError(str(error)) from None
        self._waiting = self._waiting[self._count :]
        self.attempt = world.attempt
        self._memory = OutOfMemory()
        pythons = [self._exec_command(self._command.program_of(rank.local_rank)) for rank in self._ranks]
        each = zip(self._ranks, orders, pythons, strict=True)
        await asyncio.gather(*(rank.interpreter.run(order, python) for rank, order, python in each))
        if spares:
            self._spares = asyncio.ensure_future(self._start_spares(world.attempt))
        return [rank.interpreter.process.pid for rank in self._ranks]

    async def watch(self) -> None:
        """Wait until a rank has failed or all have ended; after a failure, send SIGTERM to the other ranks."""
        ranks = self._ranks
        running = {asyncio.ensure_future(rank.interpreter.ended.wait()): rank for rank in ranks}
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [running.pop(task) for task in done]
            if any(rank.interpreter.process.returncode != 0 for rank in ended):
                for task in running:
                    task.cancel()
                # Stop this host's ranks immediately; the controller then stops all others and waits for them.
                self._signal_ranks(signal.SIGTERM)
                return
        await self._drained(ranks)

    async def stop(self, number: int, grace: float) -> None:
        """Send a signal to every rank, and SIGKILL after ``grace`` seconds; return when all have ended.

        Kill all processes that the ranks have started. A rank that is already shutting down gets SIGKILL only.
        """
        ranks = self._ranks
        left = self._signal_ranks(number)
        if left:
            ends = [asyncio.ensure_future(rank.interpreter.ended.wait()) for rank in left]
            await asyncio.wait(ends, timeout=grace)
        for rank in left:
            if not rank.interpreter.ended.is_set():
                rank.interpreter.kill(signal.SIGKILL)
        await self._drained(ranks)
        await self._store.settled()
        if ranks is self._ranks:  # otherwise a new attempt has started
            # Ranks of other hosts may still be shutting down and need the store.
            watchdog = [self._watchdog.pid] if self._watchdog is not None else []
            end_orphans(self._environ.get(processes.MARKER, ""), [*self._store.pids, *watchdog, *self._spare_pids()])

    def _signal_ranks(self, number: int) -> list[Rank]:
        """Signal the ranks that still run, each once unless by SIGKILL; return all ranks that still run."""
        left = [rank for rank in self._ranks if not rank.interpreter.ended.is_set()]
        for rank in left:
            if rank.stopped_at is None or number == signal.SIGKILL:
                rank.stopped_at = rank.stopped_at or time.time()
                rank.interpreter.kill(number)
        return left

    def notify(self, number: int) -> None:
        """Send a signal to the rank processes but not to their process groups; the ranks do not count as stopped."""
        for rank in self._ranks:
            if not rank.interpreter.ended.is_set():
                rank.interpreter.process.send_signal(number)

    def exits(self) -> list[RankExit]:
        """Return the exits of the ranks of this attempt that have ended."""
        return [self._exit_of(rank) for rank in self._ranks if rank.interpreter.ended.is_set()]

    def last_logged(self) -> int:
        """Return the highest N of the existing log folders ``attempt_N``; -1 if there are none."""
        folders = Path(self._context.log_dir).glob("attempt_*") if self._context.log_dir else ()
        numbers = [each.name.partition("_")[2] for each in folders]
        return max((int(number) for number in numbers if number.isdigit()), default=-1)

    async def _start_spares(self, attempt: int) -> None:
        """Start spare interpreters for the next attempt, and a store if this attempt has one.

        One interpreter imports at a time: the ranks need the machine. Stops if the next attempt starts meanwhile, which
        starts the interpreters that it lacks and later its own spares.
        """
        await asyncio.sleep(_SPARES_AFTER)
        with contextlib.suppress(LaunchError):  # the attempt that needs one reports the error
            while self.attempt == attempt and not self._retired and len(self._waiting) < self._count:
                self._start(len(self._waiting))
                await self._waiting[-1].ask({"op": "ready"})
        if self.attempt == attempt and self._waiting:
            self._store.start_ahead(self._waiting[0])

    def _assign(self, world: World, local_rank: int, interpreter: RankProcess) -> Rank:
        options, context = self._command.options, self._context
        rank = world.first_rank(context.replica) + local_rank
        directory = None
        if context.log_dir is not None:
            directory = Path(context.log_dir, f"attempt_{world.log_attempt}", str(rank))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shown = options.local_ranks_filter is None or local_rank in options.local_ranks_filter
        told = self._environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${rank}]:")
        names = {"role_name": options.role, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
        prefix = Template(options.log_line_prefix_template or told).safe_substitute(names)
        out = (interpreter.stdout, options.tee.stdout, options.redirects.stdout, options.duplicate_stdout_filters)
        err = (interpreter.stderr, options.tee.stderr, options.redirects.stderr, options.duplicate_stderr_filters)
        for name, console, (output, tee, redirect, texts) in (
            ("stdout", context.stdout, out),
            ("stderr", context.stderr, err),
        ):
            teed = tee(local_rank)
            onto_console = shown and (teed or not redirect(local_rank))
            path = str(directory / f"{name}.log") if directory else None
            sinks: list[LineSink] = []
            if context.run_log is not None:
                sinks.append(RunLogSink(context.run_log, rank, name))
            if texts and directory:
                filtered = directory.with_name(filtered_name(name, context.replica))
                # The file exists even if no stream is teed, as under torchrun.
                os.close(safe_files.open_file(filtered, os.O_WRONLY | os.O_CREAT))
                if teed and shown:
                    sinks.append(FilteredFile(str(filtered), texts, prefix.encode()))
            sink = sinks[0] if len(sinks) == 1 else SinkGroup(sinks) if sinks else None
            output.assign(path, console if onto_console else None, prefix if teed else "", sink)
        return Rank(interpreter, rank, local_rank, directory)

    def _order(self, world: World, rank: Rank) -> dict[str, Any]:
        program = self._command.program_of(rank.local_rank)
        error_file = ""
        if rank.directory is not None:
            (rank.directory / "error.json").unlink(missing_ok=True)
            error_file = str(rank.directory / "error.json")
            error_files.make_reserve(error_file)
        env = rank_environment(
            world, self._command.options, self._context.replica, rank.local_rank, self._environ, error_file
        )
        if self._watchdog is not None:
            env[FILE] = self._watchdog.path
        return {
            **({"cwd": os.getcwd()} if self._exec_command(program) else {}),
            "op": "run",
            "mode": program.mode,
            "target": program.target,
            "args": list(program.args),
            "orig_argv": ["-u", *_program_argv(program)],
            "env": env,
        }

    async def _drained(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            await rank.interpreter.drained.wait()

    def _exit_of(self, rank: Rank) -> RankExit:
        error: dict[str, Any] | None = None
        if rank.directory is not None:
            try:
                # All exits of a host must fit into one message to its agent.
                limit = min(error_files.TRACEBACK_BYTES, messages.MAX_LINE // (4 * len(self._ranks)))
                error = error_files.read(str(rank.directory / "error.json"), traceback_bytes=limit)
            except error_files.UnreadableError as failure:
                error = {"message": f"its error file is unreadable: {failure}"}
            error_files.remove_reserve(str(rank.directory / "error.json"))
        interpreter = rank.interpreter
        killed = interpreter.process.returncode == -signal.SIGKILL and rank.stopped_at is None
        exit = RankExit(
            rank=rank.rank,
            local_rank=rank.local_rank,
            replica=self._context.replica,
            hostname=self._context.hostname,
            pid=interpreter.process.pid,
            code=interpreter.process.returncode,
            time=interpreter.ended_at,
            stopped_at=rank.stopped_at,
            stderr_path=str(rank.directory / "stderr.log") if rank.directory else "",
            error=error,
            timer=self._watchdog.timer_of(interpreter.process.pid) if self._watchdog else "",
            started=rank.started,
            out_of_memory=self._memory.evidence() if killed else "",
        )
        if exit.failed and rank.stopped_at is not None:
            # The signal hit an interpreter that was exiting after an exception; its exit code would have been 1.
            return dataclasses.replace(exit, code=1)
        return exit


def _program_argv(program: Program) -> list[str]:
    """Return the program's part of the command line."""
    lead = {"module": ["-m", program.target], "code": ["-c", program.target]}.get(program.mode, [program.target])
    return [*lead, *program.args]
