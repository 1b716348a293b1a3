# SPDX-License-Identifier: BSD-3-Clause
"""The one run of a batch job on a host: its zygote starts with the host, and knows the program.

The script of a Monarch controller (``command.actors``) is a batch job whose only rank is on the first host.
"""

from __future__ import annotations

import asyncio
import os
import shlex

from torchx_monarch.command.actors import parse_script
from torchx_monarch.command.command import Command, CommandError, check, parse
from torchx_monarch.command.torchrun_options import unused_options
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_messages import Answer, Request
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.session import Session
from torchx_monarch.host.ranks.breakpoints import Breakpoints
from torchx_monarch.host.ranks.flight_recorders import FlightRecorders
from torchx_monarch.host.ranks.learned_preload import LearnedPreload, program_key
from torchx_monarch.host.ranks.rank_environment import env_number
from torchx_monarch.host.ranks.rank_logs import RankLogs
from torchx_monarch.host.ranks.rank_pool import RankPool
from torchx_monarch.host.ranks.rank_starter import RankStarter
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.host.ranks.watchdog import ENABLED, FILE
from torchx_monarch.host.ranks.zygote import Zygotes
from torchx_monarch.host.ranks.zygote_process import ZygoteProcess
from torchx_monarch.host.workload import Control, Host
from torchx_monarch.model.env_names import BATCH_JOB
from torchx_monarch.model.learned_modules import FOLDER, LearnedFile


class BatchRun:
    """Execute the run of a batch job on this host.

    Attributes:
        command: command of the role; None before it is parsed.
        pool: the ranks; None before they are started.
        first_output: set when a rank has printed something.
        listens: see ``Runs``.

    Args:
        host: the host.
        early: the zygote that has been started for the run; None for none.
    """

    def __init__(self, host: Host, early: ZygoteProcess | None = None) -> None:
        self.command: Command | None = None
        self.pool: RankPool | None = None
        self.first_output: asyncio.Event | None = asyncio.Event()
        self.listens = False
        self._host = host
        self._early = early
        self._logs: RankLogs | None = None
        self._learned: LearnedPreload | None = None
        self._script: Command | None = None

    def parse(self) -> Command:
        """Parse the role's command (see ``Runs``)."""
        options = self._host.options
        command = parse(options.command, self._host.environ)
        if command is None:
            raise CommandError(f"not a torchrun or Python command: {shlex.join(options.command)}")
        if command.kind == "actors":
            command = self._script = parse_script(command, self._host.environ)
            self._host.environ[BATCH_JOB] = "1"
        check(command, replicas=options.world, role=options.role)
        self.command = command
        self._host.read_grace(command)
        self._host.restarts = int(env_number(self._host.environ, "MONARCH_RESTART", 0))
        if self._script is None or options.replica == 0:
            check_script(command, os.getcwd())
        if options.replica == 0:
            for line in unused_options(command.options, in_run=False):
                self._host.reporter.line(line)
        return command

    async def start(self) -> int:
        """Start the zygote (see ``Runs``), and torch's timer server if the role's environment enables it."""
        host, command = self._host, self.command
        assert command is not None
        run = RunSpec(command, host.environ, host.options.preload_modules, forks=host.options.forks_ranks)
        self._learned = self._read_learned(command)
        log_dir = log_folder(command, host.log_dir, os.getcwd(), host.run_id(command))
        stamped = host.options.timestamps
        self._logs = RankLogs(
            host.options.replica, host.hostname, log_dir, run, host.stdout, host.stderr, stamped=stamped
        )
        first_output = self.first_output.set if self.first_output is not None else None
        zygotes = Zygotes(host.reporter.line, self._early)
        starter = RankStarter(run, zygotes, host.reporter.line, first_output, self._learned)
        breakpoints = Breakpoints(host.sockets, host.options.debug_wait, host.connect, host.reporter.line)
        recorders = FlightRecorders(host.sockets)
        self.pool = RankPool(self._logs, starter, recorders, breakpoints, host.attach_socket, host.reporter.line)
        # A script runs on the first host alone; the others run actors.
        nproc = await self.pool.start(run.nproc if self._script is None or host.options.replica == 0 else "0")
        if command.kind == "torchrun" and host.environ.get(ENABLED) == "1":
            path = host.environ.get(FILE) or os.path.join(host.sockets, "timers")
            self.pool.start_watchdog(path, host.run_id(command))
        return nproc

    def first_log_attempt(self, sizes: NodeRange) -> int:
        """Return the number of the first attempt's log folders (see ``Runs``)."""
        max_restarts = self.command.options.max_restarts if self.command else 0
        return self._host.first_log_attempt(self._logs, max_restarts, sizes)

    def session(self, control: Control, hosts: JobHosts) -> Session:
        """Return the session of the batch job, on replica 0."""
        return Session(control.options, control.rendezvous.events)

    def close(self) -> None:
        """Learn for the next job what the ranks have imported."""
        if self._learned is not None:
            self._learned.collect()

    def _read_learned(self, command: Command) -> LearnedPreload | None:
        """Return what earlier jobs have learned; None without ``-cfg preload=auto`` or a folder to keep it in."""
        host, options = self._host, self._host.options
        folder = host.environ.get(FOLDER)
        if not options.learns_preload or not folder:
            return None
        program = " ".join(program_key(command.program_of(0), os.getcwd()))
        stored = LearnedFile.of(folder, options.app, options.role, program)
        return LearnedPreload(os.path.join(host.sockets, "imported"), host.reporter.line, stored)

    async def handle(self, request: Request) -> Answer:
        """Refuse the requests of live allocations."""
        raise ValueError(f"no request of a batch job: {type(request).__name__}")


def check_script(command: Command, cwd: str, hint: str = "") -> None:
    """Check that the script of a command exists.

    Args:
        command: the command.
        cwd: folder in which its ranks start.
        hint: end of the message.

    Raises:
        CommandError: it does not exist. The exit code is then 2, as for ``python nosuch.py``.
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
