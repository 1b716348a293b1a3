# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The process of a rank: an interpreter that waits for orders (see ``rank_main``), then the program, then its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchx_monarch.host.rank_output import OutputPipe

_RANK_MAIN = str(Path(__file__).with_name("rank_main.py"))

_LEFTOVERS_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for what a rank that has ended left in its process group."""


class RankProcess:
    """Starts the process. To be used from the main thread alone: Linux ties PDEATHSIG to the thread that starts it.

    Attributes:
        process: the process; ``returncode`` is exact once ``ended`` is set.
        stdout: where what it prints goes.
        stderr: likewise.
        ended: set when the process has ended.
        ended_at: when, in seconds since the epoch.
        drained: set when its output has been read to the end and nothing is left of its process group.
        signature: what tells it from others that wait for another kind of program; whoever starts it may set it.

    Args:
        python: the interpreter with its flags.
        label: shown after them in a process listing.
        env: the environment.
        files: its limit of open files; None for ours.
        umask: its file mode creation mask.
        cwd: the folder that it starts in; None for ours.
        on_first_output: called when its program first prints.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        python: Sequence[str],
        label: Sequence[str],
        env: Mapping[str, str],
        files: tuple[int, int] | None,
        umask: int,
        cwd: str | None,
        on_first_output: Callable[[], None],
    ) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [*python, _RANK_MAIN, str(theirs.fileno()), str(os.getpid()), *label],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    env=env,
                    umask=umask,
                    cwd=cwd,
                )
            except OSError:
                self._channel.close()
                raise
        if files is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, files)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.stdout = OutputPipe(self.process.stdout, on_first_output)
        self.stderr = OutputPipe(self.process.stderr, on_first_output)
        self.ended = asyncio.Event()
        self.ended_at = 0.0
        self.drained = asyncio.Event()
        self.signature: object = None
        self._asking = asyncio.Lock()
        self._prepared: asyncio.Future[dict[str, Any] | None] | None = None
        self._tasks: list[asyncio.Task[Any]] = []  # held, or the loop might drop them
        self._binding: asyncio.Task[dict[str, Any] | None] | None = None
        self._watch()

    def prepare(self, mode: str, target: str, modules: Sequence[str]) -> None:
        """Have it set itself up for a program and import modules; later orders wait for that."""
        order = {"op": "prepare", "mode": mode, "target": target, "modules": list(modules)}
        self._prepared = asyncio.ensure_future(self._ask(order))

    @property
    def ready(self) -> bool:
        """Whether it has imported what it was told to, and lives."""
        return self._prepared is not None and self._prepared.done() and not self.ended.is_set()

    def bind(self, mode: str, gpu: int) -> None:
        """Have it run on the CPUs near a GPU alone (``--numa-binding``); ``binding_error`` says how that went."""
        self._binding = asyncio.ensure_future(self.ask({"op": "bind", "mode": mode, "gpu": gpu}))

    async def binding_error(self) -> str:
        """Why it cannot be bound, as it was told to; empty when it is, or was not told to."""
        if self._binding is None:
            return ""
        answer = await self._binding
        return "the interpreter has ended" if answer is None else str(answer.get("error", ""))

    async def ask(self, order: Mapping[str, Any], passed: Sequence[int] = ()) -> dict[str, Any] | None:
        """Send an order, descriptors with it, and wait for its answer; None when the interpreter has ended instead."""
        if self._prepared is not None:
            # It was the first order, and must be the first to go: a store is forked from what has been imported.
            await asyncio.shield(self._prepared)
        return await self._ask(order, passed)

    async def _ask(self, order: Mapping[str, Any], passed: Sequence[int] = ()) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        buffer = b""
        async with self._asking:
            try:
                line = json.dumps(order).encode() + b"\n"
                sent = socket.send_fds(self._channel, [line], passed) if passed else 0
                await loop.sock_sendall(self._channel, line[sent:])
                while not buffer.endswith(b"\n"):
                    data = await loop.sock_recv(self._channel, 65536)
                    if not data:
                        return None
                    buffer += data
            except OSError:
                return None
        answer: dict[str, Any] = json.loads(buffer)
        return answer

    async def run(self, order: Mapping[str, Any], python: Sequence[str] = ()) -> None:
        """Send the last order, once the earlier ones are answered. One that has ended shows it by its end.

        Args:
            order: what to run, and with which environment.
            python: the interpreter with its flags that it is to become first, in the folder and with the environment of
                the order; empty where it is the right one.
        """
        if python:
            await self.ask({"op": "become", "python": list(python), "cwd": order["cwd"], "env": order["env"]})
            order = {**order, "env": {}}
        async with self._asking:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self._channel, json.dumps(order).encode() + b"\n")
            self._channel.close()

    def kill(self, number: int) -> None:
        """Signal its whole process group, which may outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(self.process.pid)
        except (AttributeError, OSError):  # a Python or a kernel without them, or forbidden in this container
            loop.run_in_executor(None, self.process.wait).add_done_callback(lambda _: self._has_ended())
            return

        def readable() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self.process.wait()
            self._has_ended()

        loop.add_reader(pidfd, readable)

    def _has_ended(self) -> None:
        self.ended_at = time.time()
        self.ended.set()
        self._tasks.append(asyncio.ensure_future(self._clear_up()))

    async def _clear_up(self) -> None:
        """See to the end of its output and of what it left in its process group."""
        for number, seconds in ((None, 0.1), (signal.SIGTERM, _LEFTOVERS_GRACE), (signal.SIGKILL, 0.5)):
            if number is not None:
                self.kill(number)
            ends = [asyncio.ensure_future(output.ended.wait()) for output in (self.stdout, self.stderr)]
            _, waiting = await asyncio.wait(ends, timeout=seconds)
            for task in waiting:
                task.cancel()
            if not waiting:
                break
        self.kill(signal.SIGKILL)
        self.stdout.close()
        self.stderr.close()
        self._channel.close()
        self.drained.set()
