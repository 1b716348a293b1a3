# SPDX-License-Identifier: BSD-3-Clause
"""The one run of a batch job on a host: its zygote starts with the host, and knows the program.

The script of a Monarch controller (``command.actors``) is a batch job whose only rank is on the first host.
"""

from __future__ import annotations

import os
import shlex

from torchx_monarch.command.allocation_spec import parse_script
from torchx_monarch.command.command import Command, CommandError, check, parse
from torchx_monarch.command.torchrun_options import unused_options
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.host.host import Host
from torchx_monarch.host.ranks.run_spec import RunSpec, env_number
from torchx_monarch.host.ranks.zygote_process import ZygoteProcess
from torchx_monarch.host.workload import Workload, check_script, log_folder
from torchx_monarch.model.env_names import BATCH_JOB
from torchx_monarch.system import safe_files


class BatchRun(Workload):
    """Execute the run of a batch job on this host."""

    def __init__(self, host: Host, early: ZygoteProcess | None = None) -> None:
        super().__init__(host, early)
        self._log_dir: str | None = None
        self._restarts = 0
        self._script: Command | None = None

    def parse(self) -> Command:
        host, options = self._host, self._host.options
        command = parse(options.command, host.environ)
        if command is None:
            raise CommandError(f"not a torchrun or Python command: {shlex.join(options.command)}")
        if command.kind == "actors":
            command = self._script = parse_script(command, host.environ)
            host.environ[BATCH_JOB] = "1"
        check(command, replicas=options.world, role=options.role)
        self.command = command
        host.read_grace(command)
        self._restarts = int(env_number(host.environ, "MONARCH_RESTART", 0))
        if self._script is None or options.replica == 0:
            check_script(command, os.getcwd())
        if options.replica == 0:
            for line in unused_options(command.options, in_run=False):
                host.reporter.line(line)
        return command

    async def start(self) -> int:
        host, command = self._host, self.command
        assert command is not None
        run = RunSpec(command, host.environ, host.options.preload_modules, forks=host.options.forks_ranks)
        run_id = host.run_id(command)
        self._log_dir = log_folder(command, host.log_dir, os.getcwd(), run_id)
        self._new_pool(run, self._log_dir)
        assert self.pool is not None
        # A script runs on the first host alone; the others run actors.
        nproc = await self.pool.start(run.nproc if self._script is None or host.options.replica == 0 else "0")
        self._start_timers(run, run_id)
        return nproc

    def first_log_attempt(self, sizes: NodeRange) -> int:
        """Return the number of the first attempt's log folders, after all that earlier starts may have used.

        A start uses at most one number for each attempt that it may make. This bound is unknown in two cases: a
        job that can lose hosts may make any number of attempts, and a restarted container has no MONARCH_RESTART.
        Replica 0 then continues after the highest existing folder: it takes part in each attempt. (With replacements
        the remaining hosts know the number.)
        """
        options = self._host.options
        max_restarts = self.command.options.max_restarts if self.command else 0
        at_most = self._restarts * (1 + max_restarts + options.replacements)
        counted = "MONARCH_RESTART" in self._host.environ or options.replacements > 0
        if self.pool is None or (counted and not (sizes.can_lose and self._restarts)):
            return at_most
        numbers = safe_files.numbered(self._log_dir, "attempt_") if self._log_dir else ()
        return max(at_most, max(numbers, default=-1) + 1)
