# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The host process of one replica of a live allocation, which executes any number of runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torchx_monarch.command.allocation_spec import AllocationSpec, run_command, with_program
from torchx_monarch.command.command import Command, CommandError, Program, parse
from torchx_monarch.command.torchrun_options import DEFAULTS
from torchx_monarch.controller.controller import Controller
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.controller.session_controller import SessionController
from torchx_monarch.host.code_distribution import OPS, HostCode, distribute_code
from torchx_monarch.host.host_process import HostProcess
from torchx_monarch.host.interpreters import Interpreters
from torchx_monarch.host.rank_environment import env_number
from torchx_monarch.host.rank_logs import RankLogs
from torchx_monarch.host.rank_pool import RankPool
from torchx_monarch.host.run_spec import RunSpec
from torchx_monarch.host.watchdog import ENABLED, FILE
from torchx_monarch.insight.run_log import RunLog
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.world import LaunchError

_MESSAGE = 30_000
"""Bytes of records in one message to replica 0. A message has at most 64 kB, and JSON may double the size."""

Op = Callable[["SessionHost", dict[str, Any]], Awaitable[Any]]


def is_session(options: HostSpec, environ: Mapping[str, str]) -> bool:
    """Return whether a host's command is that of a live allocation."""
    try:
        command = parse(options.command, environ)
    except CommandError:
        return False
    return command is not None and command.kind == "hosts"


class SessionHost(HostProcess):
    """Run one replica of a live allocation to its end.

    Attributes:
        OPS: operations of ``SessionController.broadcast`` that only session hosts have, by name.
    """

    OPS: dict[str, Op] = dict(OPS)

    def __init__(self, options: HostSpec, environ: Mapping[str, str]) -> None:
        super().__init__(options, environ)
        self._allocation_spec = AllocationSpec(0.0, "0", (), None)
        self._run_queue: RunQueue | None = None
        self._interpreters: Interpreters | None = None
        self._token = ""
        self._begin_answer: dict[str, Any] = {}
        self._run_log: RunLog | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self._code: HostCode | None = None

    @property
    def code(self) -> HostCode:
        """The store of the code that clients have sent to this host."""
        self._code = self._code or HostCode(os.path.join(self._sockets, "code"))
        return self._code

    @property
    def log_dir(self) -> str:
        """Folder of this host's logs; the logs of run N are in ``run_N``."""
        return self._log_dir

    # -- start ---------------------------------------------------------------------------------------------------------

    def _parse(self) -> Command:
        command = parse(self._options.command, self._environ)
        if command is None or command.kind != "hosts":
            raise CommandError(f"not the command of an allocation: {shlex.join(self._options.command)}")
        self._allocation_spec = AllocationSpec.of(command, self._environ, self._options.replicas, self._options.role)
        self._grace = env_number(self._environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", self._options.grace)
        return command

    async def _start_interpreters(self, command: Command) -> int:
        held = self._allocation_spec.command or Command("torchrun", DEFAULTS, Program("script", "run"))
        self._pool = self._new_pool(held, None, {}, "")
        return await self._pool.start(self._allocation_spec.nproc)

    def _new_pool(self, command: Command, log_dir: str | None, env: Mapping[str, str], cwd: str) -> RankPool:
        run = RunSpec(command, self._environ, self._options.preload, env, cwd or os.getcwd())
        console = (self._stdout, self._stderr)
        logs = RankLogs(self._options.replica, self._hostname, log_dir, run, *console, self._run_log)
        self._interpreters = Interpreters(run, self._reporter.line, None, self._interpreters)
        return RankPool(logs, self._interpreters, self._reporter.line)

    @property
    def _listens(self) -> bool:
        return True

    def _controller(self, job: JobOptions, rendezvous: Rendezvous, host_network: HostNetwork) -> Controller:
        options, hold = self._options, self._allocation_spec
        self._run_queue = run_queue = RunQueue(
            rendezvous,
            options.app,
            options.role,
            self._log_dir,
            hold.words,
            hold.idle_timeout,
            lambda: self._interpreters.warm if self._interpreters else 0,
        )
        run_queue.distribute_code = lambda code: distribute_code(run_queue, self.code, code)
        job = dataclasses.replace(job, first_log_attempt=0)
        return SessionController(
            job, rendezvous, self._reporter, self._first_output, host_network.unreachable, self._handle, self._run_queue
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _handle(self, op: str, args: dict[str, Any]) -> Any:
        """Execute a request of the controller: ``begin``, ``each``, or an operation of ``HostProcess._handle``.

        ``begin`` prepares the host for a run; ``each`` is a request of ``SessionController.broadcast``. If a request
        fails, the answer is ``refused``, the error, and ``code``, the exit code: this ends the run, not the hosts.
        """
        try:
            if op == "begin":
                return await self._begin_run(args)
            if op == "each":
                return {"replica": self._options.replica, "result": await self._each(args["op"], args["args"])}
            return await super()._handle(op, args)
        except (CommandError, LaunchError) as error:
            refused = f"host {self._options.replica} ({self._hostname}): {error}"
            return {"refused": refused, "code": 2 if isinstance(error, CommandError) else 1}
        except Exception as error:
            return {"refused": f"host {self._options.replica} ({self._hostname}): {error!r}", "code": 1}

    async def _each(self, op: str, args: dict[str, Any]) -> Any:
        if op == "finish":
            return await self._finish(args["token"])
        if op in self.OPS:
            return await self.OPS[op](self, args)
        return await super()._handle(op, args)

    async def _begin_run(self, args: dict[str, Any]) -> dict[str, Any]:
        """Prepare for a run; if the same run is requested again, after another host was lost, change nothing.

        Args:
            args: ``run``, the number of the run; ``token``, its unique id; and the fields of its ``RunRequest``.

        Returns:
            ``replica``; ``nproc``, the number of ranks on this host; ``run_id``; ``max_restarts``; ``grace`` in
            seconds; and ``fresh``, whether this is the first request for the run.
        """
        if args["token"] == self._token:
            return {**self._begin_answer, "fresh": False}
        await self._close_run_log()
        cwd, env = await self._folder_for(args), args["env"]
        command = self._command_of(args, cwd, {**self._environ, **env})
        folder = os.path.join(self._log_dir, f"run_{args['run']}")
        run_id = command.options.rdzv_id if command.options.rdzv_id != "none" else f"{self._options.app}-{args['run']}"
        if self._run_queue is not None and self._run_queue.current is not None:
            self._run_log = self._run_queue.current.run_log
        else:
            try:
                self._run_log = RunLog(os.path.join(folder, "journal.jsonl"))
            except OSError as error:
                raise LaunchError(f"cannot make {error.filename}: {error.strerror}") from None
            self._forwarding = asyncio.ensure_future(self._forward(self._run_log, args["token"]))
        log_dir: str | None = folder
        if command.options.log_dir == os.devnull:
            log_dir = None
        elif command.options.log_dir:
            log_dir = os.path.abspath(os.path.join(cwd, command.options.log_dir, run_id))
        self._pool = pool = self._new_pool(command, log_dir, env, cwd)
        nproc = await pool.start(command.options.nproc_per_node if command.kind == "torchrun" else "1")
        if command.kind == "torchrun" and {**self._environ, **env}.get(ENABLED) == "1":
            path = env.get(FILE) or os.path.join(self._sockets, f"timers{args['run']}")
            pool.start_watchdog(path, run_id)
        timeout = command.options.shutdown_timeout
        self._token = args["token"]
        self._begin_answer = {
            "replica": self._options.replica,
            "nproc": nproc,
            "run_id": run_id,
            "max_restarts": command.options.max_restarts,
            "grace": self._grace if timeout is None else float(timeout),
        }
        return {**self._begin_answer, "fresh": True}

    async def _folder_for(self, args: dict[str, Any]) -> str:
        """Return the folder in which the ranks of a run start; check out its code if the client has synced it."""
        await self.code.release()
        if args["synced"]:
            return await self.code.checkout(args["code"])
        return args["cwd"] or os.getcwd()

    def _command_of(self, args: dict[str, Any], cwd: str, env: Mapping[str, str]) -> Command:
        """Build the command of a run.

        Args:
            args: arguments of the ``begin`` request.
            cwd: folder in which the ranks start.
            env: environment of the role with the variables of the run.

        Raises:
            CommandError: the command is not valid, or its folder or script is not on this host.
        """
        replicas, role, nproc = self._options.replicas, self._options.role, args["nproc"]
        words = list(args["command"] or self._allocation_spec.words)
        if not os.path.isdir(cwd):
            raise CommandError(f"there is no folder {cwd} to run in")
        if args["program"]:
            held = (
                run_command(self._allocation_spec.words, env, replicas, role, nproc)
                if self._allocation_spec.words
                else None
            )
            command = with_program(held, args["program"])
            if held is None:
                own = nproc or (self._allocation_spec.nproc if self._allocation_spec.nproc != "0" else "1")
                command = dataclasses.replace(command, options=dataclasses.replace(DEFAULTS, nproc_per_node=own))
        else:
            command = run_command(words, env, replicas, role, nproc)
        program = command.program_of(0)
        if program.mode == "script" and not os.path.exists(script := os.path.join(cwd, program.target)):
            # CommandError makes the exit code 2, as for `python nosuch.py`.
            hint = f". For the program: torchrun --no-python {program.target} …" if shutil.which(program.target) else ""
            raise CommandError(f"can't open file {script!r}: No such file or directory{hint}")
        return command

    async def _finish(self, token: str) -> int:
        """End a run and all its processes; return how many records of this host replica 0 must have received."""
        if token != self._token or self._pool is None:
            return 0
        await self._pool.stop(signal.SIGKILL, 0.0)
        self._interpreters = self._pool.retire()
        await self.code.release()
        run_log = self._run_log
        await self._close_run_log()
        return run_log.count if run_log is not None else 0

    async def _close_run_log(self) -> None:
        """Close the run log after a run and wait, at most 10 s, until its last records are sent.

        On replica 0 the run queue owns the log, and nothing is sent.
        """
        run_log, self._run_log = self._run_log, None
        forwarding, self._forwarding = self._forwarding, None
        if run_log is not None and forwarding is not None:
            run_log.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(forwarding, 10.0)

    async def _forward(self, run_log: RunLog, token: str) -> None:
        """Send the records of a run log to replica 0 while they are written."""
        async for lines in run_log.follow():
            while lines:
                message = [lines.pop(0)]
                size = len(message[0])
                while lines and size + len(lines[0]) < _MESSAGE:
                    size += len(lines[0])
                    message.append(lines.pop(0))
                if self._rendezvous_client is not None:
                    await self._rendezvous_client.tell("output", token=token, records=b"".join(message).decode())
