# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The process of a rank: first an interpreter that executes orders (see ``rank_main``), then the program."""

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
"""Seconds between SIGTERM and SIGKILL for processes that an ended rank has left in its process group."""


class RankProcess:
    """Start and control the process of one rank.

    Use from the main thread only: Linux ties PDEATHSIG to the thread that starts the process.

    Attributes:
        process: the process; ``returncode`` is exact once ``ended`` is set.
        stdout: reader of the process's stdout.
        stderr: reader of the process's stderr.
        ended: set when the process has ended.
        ended_at: time of the end, in seconds since the epoch; 0 before.
        drained: set when all output has been read and the process group has no process left.
        signature: value that a pool compares to see which programs this interpreter can run; None until the pool
            sets it.

    Args:
        python: the interpreter and its flags.
        label: arguments that are shown in a process listing and otherwise ignored.
        env: environment of the process.
        files: soft and hard limit of open files; None for the limits of this process.
        umask: file mode creation mask of the process.
        cwd: folder in which the process starts; None for the working folder of this process.
        on_first_output: called for each of the two streams when the program first prints to it.

    Raises:
        OSError: the process cannot be started.
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
        self._channel, far_end = socket.socketpair()
        self._channel.setblocking(False)
        with far_end:
            try:
                self.process = subprocess.Popen(
                    [*python, _RANK_MAIN, str(far_end.fileno()), str(os.getpid()), *label],
                    pass_fds=(far_end.fileno(),),
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
        self._tasks: list[asyncio.Task[Any]] = []  # asyncio keeps only weak references to tasks
        self._binding: asyncio.Task[dict[str, Any] | None] | None = None
        self._watch()

    def prepare(self, mode: str, target: str, modules: Sequence[str]) -> None:
        """Send the order to prepare for a program and import modules; later orders wait for the answer.

        Args:
            mode: how the program is run: ``script``, ``module``, ``code`` or ``exec``.
            target: the script, module, code or executable.
            modules: names of the modules to import.
        """
        order = {"op": "prepare", "mode": mode, "target": target, "modules": list(modules)}
        self._prepared = asyncio.ensure_future(self._ask(order))

    @property
    def ready(self) -> bool:
        """Whether the process runs and has imported the modules of ``prepare``."""
        return self._prepared is not None and self._prepared.done() and not self.ended.is_set()

    def bind(self, mode: str, gpu: int) -> None:
        """Send the order to run on the CPUs near a GPU only; ``binding_error`` returns the result.

        Args:
            mode: value of ``--numa-binding``.
            gpu: index of the GPU.
        """
        self._binding = asyncio.ensure_future(self.ask({"op": "bind", "mode": mode, "gpu": gpu}))

    async def binding_error(self) -> str:
        """Return why the process could not be bound to CPUs; empty if it is bound or ``bind`` was not called."""
        if self._binding is None:
            return ""
        answer = await self._binding
        return "the interpreter has ended" if answer is None else str(answer.get("error", ""))

    async def ask(self, order: Mapping[str, Any], passed: Sequence[int] = ()) -> dict[str, Any] | None:
        """Send an order and wait for the answer.

        Args:
            order: the order (see ``rank_main``).
            passed: file descriptors to send with it.

        Returns:
            the answer; None if the interpreter has ended.
        """
        if self._prepared is not None:
            # `prepare` must be sent first: a store is a fork of an interpreter that has imported torch.
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
        """Send the order to run the program, after the answers to all earlier orders.

        Does not raise if the process has ended: ``ended`` is set then.

        Args:
            order: the ``run`` order with the program and its environment.
            python: interpreter and flags that the process must exec first, in the folder and with the environment of
                the order; empty if it already runs the right interpreter.
        """
        if python:
            await self.ask({"op": "become", "python": list(python), "cwd": order["cwd"], "env": order["env"]})
            order = {**order, "env": {}}
        async with self._asking:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self._channel, json.dumps(order).encode() + b"\n")
            self._channel.close()

    def kill(self, number: int) -> None:
        """Send a signal to the whole process group, which may outlive the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(self.process.pid)
        except (AttributeError, OSError):  # Python or kernel without pidfds, or a container that forbids them
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
        """Read the output to its end and end the processes that are left in the process group."""
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
