# SPDX-License-Identifier: BSD-3-Clause
"""The runs of ranks on a host: the one of a batch job, ``BatchRun``, or those of ``live_runs.LiveRuns``."""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
from collections.abc import Callable
from typing import Any

from torchx_monarch.command.allocation_spec import parse_script
from torchx_monarch.command.command import Command, CommandError, check, parse
from torchx_monarch.command.torchrun_options import unused_options
from torchx_monarch.controller import host_messages
from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.controller import Controller, Session
from torchx_monarch.controller.elastic import HostFailures, HostGatherer, NodeRange
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.hosts import JobHosts, JobOptions
from torchx_monarch.controller.mesh_clients import MeshClients
from torchx_monarch.controller.rank_clients import DebugSessions, HostQueries
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.host.host import Host
from torchx_monarch.host.preflight import take_facts
from torchx_monarch.host.ranks.flight_recorders import FlightRecorders
from torchx_monarch.host.ranks.rank_logs import RankLogs
from torchx_monarch.host.ranks.rank_pool import RankPool
from torchx_monarch.host.ranks.rank_starter import RankStarter
from torchx_monarch.host.ranks.run_spec import RunSpec, env_number, with_interpreter
from torchx_monarch.host.ranks.timers import ENABLED, FILE
from torchx_monarch.host.ranks.zygote import Zygotes
from torchx_monarch.host.ranks.zygote_process import ZygoteProcess
from torchx_monarch.host.worker_loops import RankRelay
from torchx_monarch.host.workload import Workload
from torchx_monarch.insight.run_log import RunLog
from torchx_monarch.model.env_names import BATCH_JOB, CREDENTIALS
from torchx_monarch.system import safe_files


class RankRuns(Workload):
    """The runs of ranks on a host; ``pool`` are the ranks of the present one."""

    def __init__(self, host: Host, early: ZygoteProcess | None = None) -> None:
        super().__init__(host)
        self.pool: RankPool | None = None
        self._zygotes = Zygotes(host.reporter.line, early)
        self._recorders: FlightRecorders | None = None

    @property
    def sizes(self) -> NodeRange:
        options = self._host.options
        return NodeRange.from_command(self.command, options.world, options.host_timeout, options.spares)

    def first_log_attempt(self) -> int:
        """Return the number of the first attempt's log folders."""
        return 0

    def _read_grace(self, command: Command | None = None) -> None:
        """Set the grace period from torchrun's variable or option; raise ``CommandError`` if one is no number."""
        host = self._host
        host.grace = env_number(host.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", host.options.grace)
        if command is not None and command.options.shutdown_timeout is not None:
            host.grace = float(command.options.shutdown_timeout)

    async def connect(self, network: HostNetwork) -> None:
        """Prepare for worker loops, and serve the ranks at a socket."""
        await super().connect(network)
        await RankRelay(self._host, network).start()

    def controller(self, rendezvous: Rendezvous, network: HostNetwork) -> Controller:
        host, options, sizes = self._host, self._host.options, self.sizes
        job = JobOptions(
            options,
            sizes,
            host.run_id(self.command),
            host.grace,
            self.command.options.max_restarts if self.command else 0,
            self.first_log_attempt(),
            network.advertised,
            network.bind,
            # Over a network, the loss of a machine is noticed only after peer_timeout seconds of silence.
            options.peer_timeout + 3.0 if network.rendezvous.networked else 1.0,
        )
        gatherer = HostGatherer(sizes, rendezvous.hosts, host.reporter, HostFailures(options.exclude_after))
        return Controller(rendezvous, gatherer, self._serving_session(rendezvous, network, gatherer, job))

    def _serving_session(
        self, rendezvous: Rendezvous, network: HostNetwork, gatherer: HostGatherer, job: JobOptions
    ) -> Session:
        """Return the session in which the controller on replica 0 executes the runs, and serve its clients."""
        host, reporter = self._host, self._host.reporter
        hosts = JobHosts(job, rendezvous.requests, rendezvous.events, reporter, self.handle)
        queries = HostQueries(hosts)
        rendezvous.clients.update(stacks=queries.stacks, profile=queries.profile, samples=queries.samples)
        rendezvous.clients["events"] = queries.events
        hang_watch = HangWatch(hosts)
        debug_command = f"torchx monarch debug {host.options.app} --role {host.options.role}"
        rendezvous.clients.update(DebugSessions(debug_command, reporter.report, hang_watch.rest).clients)
        host.connector = rendezvous.connect
        session = self._session(rendezvous, hosts, functools.partial(Attempts, hosts, gatherer, hang_watch))
        rendezvous.clients["attach"] = MeshClients(hosts, network, host.environ.get(CREDENTIALS, ""), session).serve
        return session

    def _session(self, rendezvous: Rendezvous, hosts: JobHosts, new_attempts: Callable[[], Attempts]) -> Session:
        return Session(hosts, new_attempts)

    # -- the ranks of a run --------------------------------------------------------------------------------------------

    def _new_pool(self, run: RunSpec, log_dir: str | None, run_log: RunLog | None = None) -> None:
        host = self._host
        self._recorders = self._recorders or FlightRecorders(host.sockets)
        logs = RankLogs(host.options.replica, host.hostname, log_dir, run, host.stdout, host.stderr, run_log)
        started = run.with_leading() if host.options.leads else run
        starter = RankStarter(started, self._zygotes, host.reporter.line)
        says = (host.reporter.line, self._report_first_output)
        self.pool = RankPool(logs, starter, self._recorders, host.attach_socket, *says)

    def _start_timers(self, run: RunSpec, name: str = "timers") -> None:
        """Serve torch's timers, if the environment of the ranks enables them."""
        assert self.pool is not None
        if run.command.kind == "torchrun" and run.environ.get(ENABLED) == "1":
            self.pool.start_timers(run.environ.get(FILE) or os.path.join(self._host.sockets, name))

    async def _execute(self, request: host_messages.Request[Any]) -> Any:
        pool = self.pool
        assert pool is not None
        match request:
            case host_messages.OpenStore():
                return host_messages.StoreOpened(
                    *await pool.serve_store(request.bind, request.advertised, request.hosts)
                )
            case host_messages.LaunchRanks():
                pids = tuple(await pool.launch(request.world))
                facts = await asyncio.to_thread(take_facts, pool.run, pool.starter.versions)
                return host_messages.Launched(pids, pool.starter.imported, pool.starter.unshared, facts)
            case host_messages.ReadCollectives():
                ranks = await pool.collectives()
                longest = max((rank.longest_wait for rank in ranks), default=0.0)
                return host_messages.CollectivesRead(longest, tuple(ranks) if request.details else ())
            case host_messages.TakeFacts():
                await pool.starter.importer()  # which the ranks wait for, too
                return await asyncio.to_thread(take_facts, pool.run, pool.starter.versions)
        return await super()._execute(request)


def choose_runs(host: Host, early: ZygoteProcess | None) -> RankRuns:
    """Return the workload of a torchrun or Python command: the runs of a live allocation, or that of a batch job.

    A command that is not valid counts as a batch job's: parsing it again reports the error.
    """
    try:
        command = parse(host.options.command, host.environ)
    except CommandError:
        command = None
    if command is None or command.kind != "hosts":
        return BatchRun(host, early)
    from torchx_monarch.host.live_runs import LiveRuns

    return LiveRuns(host)


class BatchRun(RankRuns):
    """The one run of a batch job on a host: its zygote starts with the host, and knows the program.

    The script of a Monarch controller (``command.actors``) is a batch job whose only rank is on the first host.
    """

    def __init__(self, host: Host, early: ZygoteProcess | None = None) -> None:
        super().__init__(host, early)
        self._log_dir: str | None = None
        self._restarts = 0
        self._script: Command | None = None

    def parse(self) -> None:
        host, options = self._host, self._host.options
        command = parse(options.command, host.environ)
        if command is None:
            raise CommandError(f"not a torchrun or Python command: {shlex.join(options.command)}")
        if command.kind == "actors":
            command = self._script = parse_script(command, host.environ)
            host.environ[BATCH_JOB] = "1"
        check(command, replicas=options.world, role=options.role)
        typed = command.interpreter
        command = self.command = with_interpreter(command, options, host.environ, os.getcwd())
        self._read_grace(command)
        self._restarts = int(env_number(host.environ, "MONARCH_RESTART", 0))
        if self._script is None or options.replica == 0:
            check_script(command, os.getcwd())
        if options.replica == 0:
            if command.interpreter != typed:
                host.reporter.line(f"the ranks' interpreter is {command.interpreter[0]}")
            for line in unused_options(command.options, in_run=False):
                host.reporter.line(line)

    async def start(self) -> int:
        host, command = self._host, self.command
        assert command is not None
        run = RunSpec(command, host.environ, host.options.preload_modules, forks=host.options.forks_ranks)
        self._log_dir = log_folder(command, host.log_dir, os.getcwd(), host.run_id(command))
        self._new_pool(run, self._log_dir)
        assert self.pool is not None
        # A script runs on the first host alone; the others run actors.
        nproc = await self.pool.start(run.nproc if self._script is None or host.options.replica == 0 else "0")
        self._start_timers(run)
        return nproc

    def first_log_attempt(self) -> int:
        """Return the number of the first attempt's log folders, after all that earlier starts may have used.

        A start uses at most one for each attempt that it may make. This bound is unknown if a job can lose hosts, and
        in a restarted container without MONARCH_RESTART; then the folders that exist show it.
        """
        options = self._host.options
        max_restarts = self.command.options.max_restarts if self.command else 0
        numbers = safe_files.numbered(self._log_dir, "attempt_") if self._log_dir else ()
        return max(self._restarts * (1 + max_restarts + options.replacements), max(numbers, default=-1) + 1)


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
