# SPDX-License-Identifier: BSD-3-Clause
"""The runs of ranks on a host: the one of a batch job, or those of a live allocation, one after the other.

A batch job prepares for its run when the host starts. What only live allocations need is imported when one does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchx_monarch.command.allocation_spec import AllocationSpec, parse_script, run_command, with_program
from torchx_monarch.command.command import Command, CommandError, Program, check, parse
from torchx_monarch.command.torchrun_options import DEFAULTS, unused_options
from torchx_monarch.controller import host_messages
from torchx_monarch.controller.activity_record import ActivityRecord
from torchx_monarch.controller.controller import Controller
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rank_clients import DebugSessions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.host.host import Host
from torchx_monarch.host.ranks.flight_recorders import FlightRecorders
from torchx_monarch.host.ranks.rank_logs import LogSpace, RankLogs
from torchx_monarch.host.ranks.rank_pool import RankPool
from torchx_monarch.host.ranks.rank_starter import RankStarter
from torchx_monarch.host.ranks.run_output import RunOutput, read_values
from torchx_monarch.host.ranks.run_spec import RunSpec, env_number, with_interpreter
from torchx_monarch.host.ranks.timers import ENABLED, FILE
from torchx_monarch.host.ranks.zygote import Zygotes
from torchx_monarch.host.ranks.zygote_process import ZygoteProcess
from torchx_monarch.host.worker_loops import RankRelay
from torchx_monarch.host.workload import Workload
from torchx_monarch.insight.hangs import HostCollectives
from torchx_monarch.model.env_names import BATCH_JOB, LOG_REFERENCES
from torchx_monarch.model.host_facts import PROGRAM, HostFacts
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.system import log_references, safe_files
from torchx_monarch.system.run_dirs import remove_tree

if TYPE_CHECKING:
    from torchx_monarch.controller.run_queue import RunQueue
    from torchx_monarch.host.checkpoints import HostCheckpoints
    from torchx_monarch.host.code_distribution import HostCode

_KERNEL_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
"""torch's variable with the seconds that a rank may wait inside the kernel (since 2.13)."""


class RankRuns(Workload):
    """The runs of ranks on a host; ``pool`` are the ranks of the present one.

    The script of a Monarch controller (``allocation_spec``) is a batch job whose only rank is on the first host.
    """

    def __init__(self, host: Host, early: ZygoteProcess | None = None) -> None:
        super().__init__(host)
        self.pool: RankPool | None = None
        self._zygotes = Zygotes(host.reporter.line, early)
        self._recorders: FlightRecorders | None = None
        self._allocation: AllocationSpec | None = None
        self._script: Command | None = None
        self._restarts = 0
        # The controller gives up a request when a host is lost, and sends the next while the first is still executed.
        self._changing = asyncio.Lock()
        # The token of the present run, and the answer to its request.
        self._begun: tuple[str, host_messages.RunBegun] | None = None
        self._output: RunOutput | None = None
        self._function_file = ""  # of the present run; empty if its program is no function
        self._checkpoints: HostCheckpoints | None = None  # of the present run; None before its ranks start

    def parse(self) -> None:
        host, options = self._host, self._host.options
        command = parse(options.command, host.environ)
        if command is None:
            raise CommandError(f"not a torchrun or Python command: {shlex.join(options.command)}")
        host.grace = env_number(host.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", options.grace)
        if command.kind == "hosts":
            self._allocation = AllocationSpec.from_command(command, host.environ, options.world)
            self.listens = True
            return
        if command.kind == "actors":
            command = self._script = parse_script(command, host.environ)
            host.environ[BATCH_JOB] = "1"
        check(command, replicas=options.world, role=options.role)
        typed = command.interpreter
        command = self.command = with_interpreter(command, options, host.environ, os.getcwd())
        if command.options.shutdown_timeout is not None:
            host.grace = float(command.options.shutdown_timeout)
        self._restarts = int(env_number(host.environ, "MONARCH_RESTART", 0))
        if self._script is None or options.replica == 0:
            check_script(command, os.getcwd())
        if options.replica == 0 and command.interpreter != typed:
            host.reporter.line(f"the ranks' interpreter is {command.interpreter[0]}")

    async def start(self) -> None:
        command, spec, cwd = self.command, self._allocation, os.getcwd()
        if spec is not None:
            held = spec.command or Command("torchrun", DEFAULTS, Program("script", "run"))
            await self._new_pool(self._run_spec(held, {}, cwd), None).start(spec.nproc)
            return
        assert command is not None
        log_dir = log_folder(command, self._host.log_dir, cwd, self._run_id(command))
        pool = self._new_pool(self._run_spec(command), log_dir)
        # A script runs on the first host alone; the others run actors.
        nproc = "0" if self._script is not None and self._host.options.replica else pool.run.nproc
        await self._prepare(host_messages.BeginRun(), pool, nproc, self._first_log_attempt(log_dir))

    def _first_log_attempt(self, log_dir: str | None) -> int:
        """Return the number of the first attempt's log folders, after all that earlier starts may have used.

        A start uses at most one for each attempt that it may make. This bound is unknown if a job can lose hosts, and
        in a restarted container without MONARCH_RESTART; then the folders that exist show it.
        """
        options = self._host.options
        max_restarts = self.command.options.max_restarts if self.command else 0
        numbers = safe_files.numbered(log_dir, "attempt_") if log_dir else ()
        return max(self._restarts * (1 + max_restarts + options.replacements), max(numbers, default=-1) + 1)

    @property
    def sizes(self) -> NodeRange:
        options = self._host.options
        return NodeRange.from_command(self.command, options.world, options.host_timeout, options.spares)

    async def connect(self) -> None:
        await RankRelay(self._host).start()

    def controller(self, rendezvous: Rendezvous) -> Controller:
        hosts = JobHosts(rendezvous, self.sizes, self._host.reporter, self.handle)
        self._activity = asyncio.ensure_future(ActivityRecord(hosts, self._attempt_folder).run())
        hang_watch = HangWatch(hosts)
        rendezvous.network.handlers.update(DebugSessions(hosts, hang_watch.rest).handlers)
        queue = self._new_queue(hosts)
        self._serve_clients(hosts, queue)
        return Controller(hosts, hang_watch, queue)

    def _attempt_folder(self) -> str | None:
        """Return where this host has the files of the attempt that runs; None without one, or without files."""
        running = (rank.directory for rank in (self.pool.ranks if self.pool is not None else ()) if rank.is_running)
        return next((str(folder.parent) for folder in running if folder is not None), None)

    def _new_queue(self, hosts: JobHosts) -> RunQueue | None:
        """Return the queue of runs of a live allocation, on replica 0, and serve its clients."""
        if self._allocation is None:
            return None
        from torchx_monarch.controller.run_queue import RunQueue

        log_dir, disk = self._host.log_dir, self._host.disk
        queue = RunQueue(hosts, self._allocation, log_dir, disk, lambda: self._zygotes.ready)
        serve_client = functools.partial(self._code.serve_client, queue)
        self._host.network.handlers.update(sync=serve_client, code=self._code.distribute)
        return queue

    # -- a run ---------------------------------------------------------------------------------------------------------

    def _run_id(self, command: Command, number: int = 0) -> str:
        """Return TORCHELASTIC_RUN_ID: torchrun's ``--rdzv-id``, else the app's id (torchrun: a random id or none)."""
        app = self._host.options.app
        if command.options.rdzv_id != "none":
            return command.options.rdzv_id
        return f"{app}-{number}" if number else app

    def _run_spec(self, command: Command, env: Mapping[str, str] | None = None, cwd: str | None = None) -> RunSpec:
        """Return what a run executes; it reads the program."""
        options = self._host.options
        run = RunSpec(command, self._host.environ, options.preload_modules, env or {}, cwd, options.forks_ranks)
        return run.with_leading() if options.shares_imports else run

    def _new_pool(self, run: RunSpec, log_dir: str | None) -> RankPool:
        host = self._host
        self._recorders = self._recorders or FlightRecorders(host.sockets, host.disk)
        shown = host.stdout, host.stderr, self._output
        logs = RankLogs(host.options.replica, host.hostname, log_dir, run, self._space, *shown)
        starter = RankStarter(run, self._zygotes, host.reporter.line)
        says = (host.reporter.line, self._report_first_output)
        given = (logs, starter, self._recorders, host.disk, host.attach_socket)
        self.pool = pool = RankPool(*given, *says, ends_at=host.ends_at)
        return pool

    async def _prepare(
        self, begin: host_messages.BeginRun, pool: RankPool, nproc: str, first_log_attempt: int = 0
    ) -> host_messages.RunBegun:
        """Prepare for the ranks of a run, and return the answer to its request, as to each repetition of that."""
        host, run, options = self._host, pool.run, pool.run.command.options
        if host.options.replica == 0:
            for line in unused_options(options, in_run=self._allocation is not None):
                host.reporter.line(line)
        count = await pool.start(nproc)
        if run.command.kind == "torchrun" and run.environ.get(ENABLED) == "1":  # torch's timers
            name = f"timers{begin.number or ''}"
            pool.start_timers(run.environ.get(FILE) or os.path.join(host.sockets, name))
        begun = host_messages.RunBegun(
            nproc=count,
            run_id=self._run_id(run.command, begin.number),
            max_restarts=options.max_restarts,
            grace=host.grace if options.shutdown_timeout is None else float(options.shutdown_timeout),
            first_log_attempt=first_log_attempt,
            kernel_timeout=env_number(run.environ, _KERNEL_TIMEOUT, 0.0),
        )
        self._begun = begin.token, begun
        return begun

    async def _begin(self, begin: host_messages.BeginRun) -> host_messages.RunBegun:
        """Prepare for a run; if the same run is requested again, after another host was lost, change nothing."""
        host, request = self._host, begin.request
        if self._begun is not None and self._begun[0] == begin.token:
            return self._begun[1]
        cwd = request.cwd or os.getcwd()
        if request.code:
            cwd = await self._code.checkout(request.code, request.workspace)
        folder = os.path.join(host.log_dir, f"run_{begin.number}")
        self._function_file = os.path.join(folder, "function") if request.function else ""
        run = await host.disk.run(self._plan, request, cwd, self._function_file)
        self._output = RunOutput(begin.token)
        pool = self._new_pool(run, log_folder(run.command, folder, cwd, self._run_id(run.command, begin.number)))
        return await self._prepare(begin, pool, run.nproc)

    def _plan(self, request: RunRequest, cwd: str, function_file: str) -> RunSpec:
        """Return what a run executes; the function that it calls, if it does, is written into a file."""
        if function_file:
            request = dataclasses.replace(request, program=(*(request.program or ()), function_file))
        command = self._command_of(request, cwd, {**self._host.environ, **request.env})
        if function_file:
            os.makedirs(os.path.dirname(function_file), mode=0o700, exist_ok=True)
            safe_files.replace_file(function_file, base64.b64decode(request.function))
        return self._run_spec(command, request.env, cwd)

    async def _finish(self, token: str) -> None:
        """End a run and all its processes; what replica 0 then reads of its output is the last."""
        output = self._output
        if output is None or output.token != token or self.pool is None:
            return
        await self.pool.stop(signal.SIGKILL, 0.0)
        ranks = {rank.rank for rank in self.pool.ranks}
        self.pool.retire()
        await asyncio.to_thread(self._close_checkpoints())
        if self._function_file:
            self._host.disk.call(remove_tree, self._function_file)
        last = read_values(os.path.dirname(self._function_file), ranks) if self._function_file else iter(())
        self._host.stdout.writer.call(self._space.call, output.end, last)  # after the references that wait there

    @functools.cached_property
    def _space(self) -> LogSpace:
        host = self._host
        referred = (
            host.log_dir
            if host.environ.get(LOG_REFERENCES) == log_references.pipes(host.stdout.fd, host.stderr.fd)
            else ""
        )
        return LogSpace(host.reporter.line, host.options.log_limit, referred)

    @functools.cached_property
    def _code(self) -> HostCode:
        from torchx_monarch.host.code_distribution import HostCode

        return HostCode(os.path.join(self._host.sockets, "code"), self._host.network)

    def _command_of(self, request: RunRequest, cwd: str, environ: Mapping[str, str]) -> Command:
        spec, replicas = self._allocation, self._host.options.world
        assert spec is not None
        if not os.path.isdir(cwd):
            raise CommandError(f"there is no folder {cwd} to run in")
        if request.program:
            held = run_command(spec.words, environ, replicas, request.nproc) if spec.words else None
            command = with_program(held, request.program)
            if held is None:
                own = request.nproc or (spec.nproc if spec.nproc != "0" else "1")
                command = dataclasses.replace(command, options=dataclasses.replace(DEFAULTS, nproc_per_node=own))
        else:
            command = run_command(request.command or spec.words, environ, replicas, request.nproc)
        target = command.program_of(0).target
        hint = f". For the program: torchrun --no-python {target} …" if shutil.which(target) else ""
        check_script(command, cwd, hint)
        return with_interpreter(command, self._host.options, environ, cwd)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    async def _held_checkpoints(self) -> HostCheckpoints:
        """Return the checkpoints of the present run; new ones if something has removed their memory."""
        from torchx_monarch.host.checkpoints import HostCheckpoints

        async with self._changing:
            held = self._checkpoints
            if held is not None and not await asyncio.to_thread(os.path.exists, held.folder):
                self._host.reporter.line(f"{self._host.name}: something has removed its checkpoints in {held.folder}")
                await asyncio.to_thread(self._close_checkpoints())
            self._checkpoints = self._checkpoints or await HostCheckpoints.create(self._host)
            return self._checkpoints

    def _close_checkpoints(self) -> Callable[[], None]:
        """End those of the present run; return what frees their memory."""
        checkpoints, self._checkpoints = self._checkpoints, None
        return checkpoints.close() if checkpoints is not None else lambda: None

    def close(self) -> None:
        super().close()
        self._close_checkpoints()()

    async def _execute(self, request: host_messages.Request[Any]) -> Any:
        match request:
            case host_messages.BeginRun():
                async with self._changing:
                    return await self._begin(request)
            case host_messages.FinishRun():
                async with self._changing:
                    return await self._finish(request.token)
            case host_messages.ReadOutput():
                is_present = self._output is not None and self._output.token == request.token
                return await self._output.read() if self._output is not None and is_present else ""
            case host_messages.ProbeFile():
                return await asyncio.to_thread(os.path.exists, request.path)
        pool = self.pool
        assert pool is not None
        match request:
            case host_messages.OpenStore():
                network = self._host.network
                opened = await pool.serve_store(network.bind, network.advertised, request.hosts)
                return host_messages.StoreOpened(*opened)
            case host_messages.ListCheckpoints():
                return await (await self._held_checkpoints()).find()
            case host_messages.KeepCheckpoints():
                return await (await self._held_checkpoints()).keep(request)
            case host_messages.RestoreCheckpoint():
                return await (await self._held_checkpoints()).restore(request)
            case host_messages.PersistCheckpoint():
                return await (await self._held_checkpoints()).persist(request)
            case host_messages.LaunchRanks():
                checkpoints = await self._held_checkpoints()
                checkpoints.world = request.world
                pool.checkpoints = checkpoints.folder
                pids = tuple(await pool.launch(request.world))
                facts = await asyncio.to_thread(take_facts, pool.run, pool.starter.versions)
                return host_messages.Launched(pids, pool.starter.imported, pool.starter.unshared, facts)
            case host_messages.StopAtStep():
                return await pool.stop_at_step(**vars(request))
            case host_messages.ReadCollectives():
                ranks = await pool.collectives()
                found = HostCollectives.from_ranks(ranks, request.details)
                if not request.seconds:
                    return found
                return dataclasses.replace(found, pace=await pool.pace(ranks, request.seconds, request.calls))
            case host_messages.TakeFacts():
                await pool.starter.importer()  # which the ranks wait for, too
                return await asyncio.to_thread(take_facts, pool.run, pool.starter.versions)
        return await super()._execute(request)


def check_script(command: Command, cwd: str, hint: str = "") -> None:
    """Raise ``CommandError`` if the script of a command, whose ranks start in ``cwd``, does not exist.

    ``hint`` ends the message. The exit code is then 2, as for ``python nosuch.py``.
    """
    program = command.program_of(0)
    path = os.path.join(cwd, program.target)
    if program.mode == "script" and not os.path.exists(path):
        raise CommandError(f"can't open file {path!r}: No such file or directory{hint}")


def log_folder(command: Command, default: str, cwd: str, run_id: str) -> str | None:
    """Return the folder of the ranks' logs; None for no files, as torchrun writes none with ``--log-dir /dev/null``."""
    if command.options.log_dir == os.devnull:
        return None
    if command.options.log_dir:
        return os.path.abspath(os.path.join(cwd, command.options.log_dir, run_id))
    return default


def take_facts(run: RunSpec, versions: HostFacts) -> HostFacts:
    """Return the facts of this host for a run, whose zygote has told ``versions``. It reads the script."""
    return {**versions, **_driver(), **_program(run)}


def _driver() -> HostFacts:
    with contextlib.suppress(OSError):
        driver = re.search(r"Kernel Module\D+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        if driver:
            return {"NVIDIA driver": driver[1]}
    return {}


def _program(run: RunSpec) -> HostFacts:
    program = run.command.program_of(0)
    path = os.path.join(run.cwd or os.getcwd(), program.target)
    if program.mode == "script" and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return {PROGRAM: f"of SHA-256 {hashlib.sha256(file.read()).hexdigest()[:12]}"}
    return {}
