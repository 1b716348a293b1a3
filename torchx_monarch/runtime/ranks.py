# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of one host: interpreters started ahead, then processes with exact exit codes.

They are children of the host process itself, which exists before the mesh does: so they import torch while the mesh
forms. The agent actor, in a process of its own, is how the controller reaches them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from torchx_monarch.errors import RankExit
from torchx_monarch.plan.command import Command
from torchx_monarch.runtime.environment import World, interpreter_environment, rank_environment
from torchx_monarch.runtime.output import RankOutput

_RANK_MAIN = str(Path(__file__).with_name("rank_main.py"))

_LEFTOVERS_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for what a rank that has ended left in its process group."""


class LaunchError(Exception):
    """The ranks of this host could not be started; the message says why."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the ranks of a host belong and where their output goes.

    Attributes:
        replica: id of the host's replica.
        hostname: name of the machine.
        log_dir: gets ``attempt_N/RANK/{stdout,stderr}.log`` and ``error.json``.
        stdout: descriptor for prefixed stdout lines.
        stderr: descriptor for prefixed stderr lines.
    """

    replica: int
    hostname: str
    log_dir: str
    stdout: int = 1
    stderr: int = 2


class _Rank:
    """One interpreter, waiting or running."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: socket.socket, outputs: tuple[RankOutput, RankOutput]
    ):
        self.process = process
        self.channel = channel
        self.outputs = outputs
        self.rank = -1
        self.directory = ""
        self.stopped = False
        self.ended_at = 0.0
        self.ended = asyncio.Event()
        self.drained = asyncio.Event()
        self._asking = asyncio.Lock()

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send an order and wait for its answer; None when the interpreter has ended instead."""
        loop = asyncio.get_running_loop()
        buffer = b""
        async with self._asking:
            try:
                await loop.sock_sendall(self.channel, json.dumps(order).encode() + b"\n")
                while not buffer.endswith(b"\n"):
                    data = await loop.sock_recv(self.channel, 65536)
                    if not data:
                        return None
                    buffer += data
            except OSError:
                return None
        answer: dict[str, Any] = json.loads(buffer)
        return answer

    async def start_program(self, order: Mapping[str, Any]) -> None:
        """Send the last order, once the earlier ones are answered. One that has ended is reported as an exit."""
        async with self._asking:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self.channel, json.dumps(order).encode() + b"\n")
            self.channel.close()

    def kill(self, number: int) -> None:
        """Signal its whole process group, which may outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class RankPool:
    """Starts, watches and stops the ranks of this host. To be used from the host's main thread alone.

    The main thread, because Linux ties PDEATHSIG to the thread that started the child.

    Args:
        command: what the role runs.
        place: who we are and where output goes.
        environ: the environment of the role.
        preload: modules that interpreters of a torchrun command import ahead.
        on_first_output: called once, when a rank first prints.
    """

    def __init__(
        self,
        command: Command,
        place: Place,
        environ: Mapping[str, str],
        preload: Sequence[str],
        on_first_output: Callable[[], None],
    ) -> None:
        self._command = command
        self._place = place
        self._environ = environ
        self._preload = list(preload) if command.kind == "torchrun" and command.program.mode != "exec" else []
        self._on_first_output: Callable[[], None] | None = on_first_output
        self._ranks: list[_Rank] = []
        self._tasks: list[asyncio.Task[Any]] = []  # held, or the loop might drop them
        self._reserved: socket.socket | None = None

    # -- before the attempt --------------------------------------------------------------------------------------------

    async def warm(self, nproc: str) -> int:
        """Start the interpreters; they import their modules while we return.

        Args:
            nproc: a number, or auto, cpu, gpu, xpu, which torch itself resolves, in the first interpreter.

        Returns:
            how many ranks this host has.

        Raises:
            LaunchError: the interpreter cannot be started, or torch refuses the name.
        """
        if nproc.isdigit():
            count = int(nproc)
        else:
            first = self._start(0, 2)
            answer = await first.ask({"op": "count", "device": nproc}) or {"error": "the interpreter ended"}
            if "error" in answer:
                raise LaunchError(f"--nproc-per-node={nproc} cannot be resolved on this host: {answer['error']}")
            count = int(answer["count"])
            if count < 1:
                raise LaunchError(f"--nproc-per-node={nproc} gives {count} ranks on this host; 1 or more are needed")
        for local_rank in range(len(self._ranks), count):
            self._start(local_rank, count)
        return count

    async def serve_store(self, address: str) -> tuple[int, bool]:
        """Find the port where the ranks meet, on rank 0's host.

        With torch preloaded, local rank 0's interpreter serves a TCPStore there, bound before anybody is told: no other
        process can take the port. Without, the port is held by a socket that never listens; SO_REUSEADDR lets the
        program's own store, which sets it as well, bind it all the same.

        Returns:
            the port, and whether a store is served there already.
        """
        if self._preload:
            answer = await self._ranks[0].ask({"op": "store", "address": address})
            if answer and "port" in answer:
                return int(answer["port"]), True
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return int(self._reserved.getsockname()[1]), False

    def _interpreter(self) -> list[str]:
        if self._command.program.mode == "exec":
            return [sys.executable, "-I", "-S"]
        typed = list(self._command.interpreter) or ["python"]
        if typed[0] in ("python", "python3"):
            # The environment that the host runs in, as under torchrun; PATH may know another of that name, or none.
            typed[0] = sys.executable
        return [*typed, "-u"]

    def _start(self, local_rank: int, count: int) -> _Rank:
        program = self._command.program
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        interpreter = self._interpreter()
        with theirs:
            argv = [*interpreter, _RANK_MAIN, str(theirs.fileno()), str(os.getpid()), *self._typed(local_rank)]
            try:
                process = subprocess.Popen(
                    argv,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    env=interpreter_environment(self._environ, count),
                )
            except OSError as error:
                ours.close()
                raise LaunchError(f"cannot start the Python interpreter {interpreter[0]!r}: {error.strerror}") from None
        assert process.stdout is not None and process.stderr is not None
        outputs = tuple(RankOutput(os.dup(pipe.fileno()), self._printed) for pipe in (process.stdout, process.stderr))
        process.stdout.close()
        process.stderr.close()
        rank = _Rank(process, ours, (outputs[0], outputs[1]))
        self._ranks.append(rank)
        self._watch(rank)
        prepare = {"op": "prepare", "mode": program.mode, "target": program.target, "modules": self._preload}
        self._tasks.append(asyncio.ensure_future(rank.ask(prepare)))
        return rank

    def _typed(self, local_rank: int) -> list[str]:
        """The program's part of the command line, with torchrun's ``${local_rank}`` macro substituted."""
        program = self._command.program
        lead = {"module": ["-m", program.target], "code": ["-c", program.target]}.get(program.mode, [program.target])
        args = [Template(arg).safe_substitute(local_rank=str(local_rank)) for arg in program.args]
        return [*lead, *args]

    def _printed(self) -> None:
        if self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None

    # -- the attempt ---------------------------------------------------------------------------------------------------

    async def launch(self, world: World) -> list[int]:
        """Give every interpreter its rank and have it run the program.

        Returns:
            the processes, by local rank.

        Raises:
            LaunchError: the log files cannot be made, or the environment cannot.
        """
        try:
            await asyncio.gather(*(self._launch(world, number) for number in range(len(self._ranks))))
        except OSError as error:
            raise LaunchError(f"cannot write the ranks' logs: {error.strerror}: {error.filename}") from None
        except ValueError as error:
            raise LaunchError(str(error)) from None
        return [rank.process.pid for rank in self._ranks]

    async def watch(self) -> None:
        """Returns when a rank has failed or all have ended."""
        running = {asyncio.ensure_future(rank.ended.wait()): rank for rank in self._ranks}
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [running.pop(task) for task in done]
            if any(rank.process.returncode != 0 for rank in ended):
                for task in running:
                    task.cancel()
                return
        await self._drain()

    async def stop(self, number: int, grace: float) -> None:
        """Send a signal to every rank, SIGKILL to those left after ``grace`` seconds; returns when all have ended."""
        left = [rank for rank in self._ranks if not rank.ended.is_set()]
        for rank in left:
            rank.stopped = True
            rank.kill(number)
        if left:
            await asyncio.wait([asyncio.ensure_future(rank.ended.wait()) for rank in left], timeout=grace)
        for rank in left:
            if not rank.ended.is_set():
                rank.kill(signal.SIGKILL)
        await self._drain()

    def exits(self) -> list[RankExit]:
        """How the ranks that have ended did."""
        return [self._exit_of(local_rank, rank) for local_rank, rank in enumerate(self._ranks) if rank.ended.is_set()]

    async def _launch(self, world: World, local_rank: int) -> None:
        rank = self._ranks[local_rank]
        options, place = self._command.options, self._place
        rank.rank = world.first_rank(place.replica) + local_rank
        rank.directory = os.path.join(place.log_dir, f"attempt_{world.attempt}", str(rank.rank))
        os.makedirs(rank.directory, mode=0o700, exist_ok=True)
        error_file = os.path.join(rank.directory, "error.json")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(error_file)
        shown = options.local_ranks_filter is None or local_rank in options.local_ranks_filter
        template = self._environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${rank}]:")
        prefix = Template(template).safe_substitute(role_name=options.role, rank=rank.rank, local_rank=local_rank)
        for output, console, name, tee, redirect in (
            (rank.outputs[0], place.stdout, "stdout", options.tee.stdout, options.redirects.stdout),
            (rank.outputs[1], place.stderr, "stderr", options.tee.stderr, options.redirects.stderr),
        ):
            teed = tee(local_rank)
            onto_console = shown and (teed or not redirect(local_rank))
            path = os.path.join(rank.directory, f"{name}.log")
            output.assign(path, console if onto_console else None, prefix if teed else "")
        env = rank_environment(world, options, place.replica, local_rank, self._environ, error_file)
        typed = self._typed(local_rank)
        order = {
            "op": "run",
            "mode": self._command.program.mode,
            "target": self._command.program.target,
            "args": typed[len(typed) - len(self._command.program.args) :],
            "orig_argv": ["-u", *typed],
            "env": env,
            "unset": [],
        }
        await rank.start_program(order)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _watch(self, rank: _Rank) -> None:
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(rank.process.pid)
        except OSError:  # before Linux 5.3, or forbidden in this container
            loop.run_in_executor(None, rank.process.wait).add_done_callback(lambda _: self._ended(rank))
            return

        def readable() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            rank.process.wait()
            self._ended(rank)

        loop.add_reader(pidfd, readable)

    def _ended(self, rank: _Rank) -> None:
        rank.ended_at = time.time()
        rank.ended.set()
        self._tasks.append(asyncio.ensure_future(self._clear_up(rank)))

    async def _clear_up(self, rank: _Rank) -> None:
        """See to the end of a rank's output and of what it left in its process group."""
        for number, seconds in ((None, 0.1), (signal.SIGTERM, _LEFTOVERS_GRACE), (signal.SIGKILL, 0.5)):
            if number is not None:
                rank.kill(number)
            ends = [asyncio.ensure_future(output.ended.wait()) for output in rank.outputs]
            _, waiting = await asyncio.wait(ends, timeout=seconds)
            for task in waiting:
                task.cancel()
            if not waiting:
                break
        rank.kill(signal.SIGKILL)
        for output in rank.outputs:
            output.close()
        rank.channel.close()
        rank.drained.set()

    async def _drain(self) -> None:
        for rank in self._ranks:
            if rank.rank >= 0 or rank.stopped or rank.ended.is_set():
                await rank.drained.wait()

    def _exit_of(self, local_rank: int, rank: _Rank) -> RankExit:
        error: Any = None
        with contextlib.suppress(OSError, ValueError):
            error = json.loads(Path(rank.directory, "error.json").read_text()) if rank.directory else None
        code = rank.process.returncode
        return RankExit(
            rank=rank.rank,
            local_rank=local_rank,
            replica=self._place.replica,
            hostname=self._place.hostname,
            pid=rank.process.pid,
            code=code if code is not None else 0,
            time=rank.ended_at,
            stopped=rank.stopped,
            stderr_path=os.path.join(rank.directory, "stderr.log") if rank.directory else "",
            error=error if isinstance(error, dict) else None,
        )
