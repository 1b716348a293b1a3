# SPDX-License-Identifier: BSD-3-Clause
"""The runs of a live allocation on one host: any number, one after the other."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchx_monarch.command.allocation_spec import AllocationSpec, run_command, with_program
from torchx_monarch.command.command import Command, CommandError, Program, parse
from torchx_monarch.command.torchrun_options import DEFAULTS, unused_options
from torchx_monarch.controller import host_messages
from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.controller import Session
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.run_queue import VALUES_TIMEOUT, RunQueue
from torchx_monarch.function import MAX_VALUE_BYTES, VALUE
from torchx_monarch.host.code_distribution import HostCode, probe
from torchx_monarch.host.host import Host
from torchx_monarch.host.rank_runs import RankRuns, check_script, log_folder
from torchx_monarch.host.ranks.run_spec import RunSpec, with_interpreter
from torchx_monarch.insight.run_log import RunLog
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import safe_files

_LAST_OUTPUT_TIMEOUT = 10.0
"""Seconds in which the last output of a run must reach replica 0."""

_VALUE_PART = 18_000
"""Bytes of a value in one record: 24 kB as base64."""


class LiveRuns(RankRuns):
    """Execute the runs of a live allocation on this host. The first output of a run is not reported."""

    listens = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._allocation_spec = AllocationSpec(0.0, "0", (), None)
        self._run_queue: RunQueue | None = None
        # The controller gives up a request when a host is lost, and sends the next while the first is still executed.
        self._changing = asyncio.Lock()
        # The token of the present run, and the answer to its request.
        self._begun: tuple[str, host_messages.RunBegun] | None = None
        self._run_log: RunLog | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self._code: HostCode | None = None
        self._function_file = ""  # of the present run; empty if its program is no function

    def parse(self) -> None:
        options = self._host.options
        command = parse(options.command, self._host.environ)
        if command is None or command.kind != "hosts":
            raise CommandError(f"not the command of an allocation: {shlex.join(options.command)}")
        self._allocation_spec = AllocationSpec.from_command(command, self._host.environ, options.world)
        self._read_grace()

    async def start(self) -> int:
        spec = self._allocation_spec
        held = spec.command or Command("torchrun", DEFAULTS, Program("script", "run"))
        self._prepare(held, None, {}, os.getcwd())
        assert self.pool is not None
        return await self.pool.start(spec.nproc)

    def _session(self, rendezvous: Rendezvous, hosts: JobHosts, new_attempts: Callable[[], Attempts]) -> Session:
        code, log_dir = self._host_code(), self._host.log_dir
        self._run_queue = RunQueue(
            hosts, new_attempts, rendezvous, self._allocation_spec, log_dir, lambda: self._zygotes.ready
        )
        self._run_queue.serve("sync", functools.partial(code.serve_client, self._run_queue))
        rendezvous.clients["code"] = code.serve_host
        return self._run_queue

    async def _execute(self, request: host_messages.Request[Any]) -> Any:
        match request:
            case host_messages.BeginRun():
                async with self._changing:
                    return await self._begin(request)
            case host_messages.FinishRun():
                async with self._changing:
                    return await self._finish(request.token)
            case host_messages.FetchCode():
                return await self._fetch(request.tree)
            case host_messages.ProbeFile():
                return await probe(request.path, request.text)
        return await super()._execute(request)

    # -- a run ---------------------------------------------------------------------------------------------------------

    async def _begin(self, begin: host_messages.BeginRun) -> host_messages.RunBegun:
        """Prepare for a run; if the same run is requested again, after another host was lost, change nothing."""
        host, request = self._host, begin.request
        if self._begun is not None and self._begun[0] == begin.token:
            return self._begun[1]
        await self._close_run_log()
        cwd = request.cwd or os.getcwd()
        if request.code:
            await self._fetch(request.code)
            cwd = await self._host_code().checkout(request.code, request.workspace)
        environ = {**host.environ, **request.env}
        folder = os.path.join(host.log_dir, f"run_{begin.number}")
        self._function_file = os.path.join(folder, "function") if request.function else ""
        if self._function_file:
            request = dataclasses.replace(request, program=(*(request.program or ()), self._function_file))
        command = self._command_of(request, cwd, environ)
        run_id = command.options.rdzv_id if command.options.rdzv_id != "none" else f"{host.options.app}-{begin.number}"
        self._open_run_log(folder, begin.token)
        if self._function_file:
            safe_files.replace_file(self._function_file, base64.b64decode(request.function))
        if self._run_queue is not None:  # on replica 0, whose lines the clients see
            for line in unused_options(command.options, in_run=True):
                host.reporter.line(line)
        run = self._prepare(command, log_folder(command, folder, cwd, run_id), request.env, cwd)
        assert self.pool is not None
        nproc = await self.pool.start(run.nproc)
        self._start_timers(run, f"timers{begin.number}")
        timeout = command.options.shutdown_timeout
        grace = host.grace if timeout is None else float(timeout)
        begun = host_messages.RunBegun(nproc, run_id, command.options.max_restarts, grace)
        self._begun = (begin.token, begun)
        return begun

    def _prepare(self, command: Command, log_dir: str | None, env: Mapping[str, str], cwd: str) -> RunSpec:
        host = self._host
        run = RunSpec(command, host.environ, host.options.preload_modules, env, cwd, host.options.forks_ranks)
        self._new_pool(run, log_dir, self._run_log)
        return run

    async def _fetch(self, tree: str) -> None:
        """Get code from replica 0, unless it is on this host, or this host is replica 0."""
        if self._run_queue is None:
            await self._host_code().fetch(tree, self._host.connect)

    def _host_code(self) -> HostCode:
        self._code = self._code or HostCode(os.path.join(self._host.sockets, "code"), self._host.name)
        return self._code

    def _command_of(self, request: RunRequest, cwd: str, environ: Mapping[str, str]) -> Command:
        spec, replicas = self._allocation_spec, self._host.options.world
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

    async def _finish(self, token: str) -> None:
        """End a run and all its processes, and send its last output to replica 0."""
        if self._begun is None or self._begun[0] != token or self.pool is None:
            return
        await self.pool.stop(signal.SIGKILL, 0.0)
        ranks = {rank_exit.rank for rank_exit in self.pool.exits()}
        self.pool.retire()
        if self._function_file:
            await self._send_values(os.path.dirname(self._function_file), ranks)
        await self._close_run_log(VALUES_TIMEOUT if self._function_file else _LAST_OUTPUT_TIMEOUT)

    async def _send_values(self, folder: str, ranks: Collection[int]) -> None:
        """Add what a function has returned in ranks of the last attempt to the run log, and remove its files."""
        with contextlib.suppress(OSError):
            os.unlink(self._function_file)
        for rank in sorted(safe_files.numbered(folder, VALUE)):
            if rank not in ranks:
                continue  # of an earlier attempt, on other hosts
            path = os.path.join(folder, f"{VALUE}{rank}")
            try:
                content = await asyncio.to_thread(safe_files.read_file, path, limit=MAX_VALUE_BYTES + 100)
                os.unlink(path)
            except OSError as error:  # the rank has made something else of it
                content = f"none\na value that its host cannot read: {error.strerror}".encode()
            for start in range(0, len(content), _VALUE_PART):
                part = base64.b64encode(content[start : start + _VALUE_PART]).decode()
                is_last = start + _VALUE_PART >= len(content)
                if self._run_log is not None:
                    self._run_log.append({"type": "value", "rank": rank, "part": part, "last": is_last})

    # -- its output ----------------------------------------------------------------------------------------------------

    def _open_run_log(self, folder: str, token: str) -> None:
        """Open the log of a run: on replica 0 that of the run queue, elsewhere one that is sent to replica 0."""
        if self._run_queue is not None and self._run_queue.current is not None:
            self._run_log = self._run_queue.current.run_log
            return
        try:
            self._run_log = RunLog(os.path.join(folder, "journal.jsonl"))
        except OSError as error:
            raise LaunchError(f"cannot make {error.filename}: {error.strerror}") from None
        self._forwarding = asyncio.ensure_future(self._forward(self._run_log, token))

    async def _close_run_log(self, within: float = _LAST_OUTPUT_TIMEOUT) -> None:
        """Close the run log after a run and wait, at most so many seconds, until its last records are sent.

        On replica 0 the run queue owns the log, and nothing is sent.
        """
        run_log, self._run_log = self._run_log, None
        forwarding, self._forwarding = self._forwarding, None
        if run_log is not None and forwarding is not None:
            run_log.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(forwarding, within)

    async def _forward(self, run_log: RunLog, token: str) -> None:
        async for lines in run_log.follow():
            if (report := self._host.report) is not None:
                await report(host_messages.RunOutput(token, b"".join(lines).decode()))
