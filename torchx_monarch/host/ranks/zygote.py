# SPDX-License-Identifier: BSD-3-Clause
"""Start and control the zygotes of a host (``zygote_main``), of which its ranks and their TCPStore are forks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import IO, Any

from torchx_monarch.host.ranks.leading_statements import source_path
from torchx_monarch.host.ranks.master_store import StoreProcess
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.host.ranks.zygote_process import ZygoteProcess
from torchx_monarch.model.job_result import describe_code
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import children, processes

_IMPORT_TIMEOUT = 600.0
"""Seconds within which a zygote must have imported its modules, from a file system as slow as it may be."""

_ORDER_TIMEOUT = 150.0
"""Seconds within which a zygote must execute any other order; the slowest one asks torch in a fork."""

_FORKS_PER_ORDER = 16
"""Processes that are forked at once. The zygote has all their descriptors open, up to three of each, and ranks inherit
its limit of open files, so that is the user's; a message has at most 253."""

_MAX_ZYGOTES = 3
"""Zygotes that a live allocation keeps for later runs with other interpreters, modules or early variables."""


class ZygoteError(LaunchError):
    """Raised when a zygote has ended or does not answer; the message gives the reason."""


class Zygote(children.Child):
    """Represent one zygote, which executes one order after the other.

    Its coroutines raise ``ZygoteError`` if the zygote has ended or does not answer. Only ``imports`` may be cancelled:
    the answer to another order would be taken for that to the next.

    Attributes:
        signature: equal for runs whose ranks can be forks of this zygote (``RunSpec.signature``).
        ready: whether it runs and has imported its modules.
        imported: when its import of the modules began and ended, in seconds since the epoch; empty before that.
    """

    def __init__(self, started: ZygoteProcess, say: Callable[[str], None]) -> None:
        super().__init__(started.process.pid)
        self.signature: object = started.signature
        self.imported: tuple[float, ...] = ()
        self._started = started.started
        self._channel = started.channel
        self._channel.setblocking(False)
        if processes.given_files is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_NOFILE, processes.given_files)
        assert started.process.stdout is not None
        self._showing = asyncio.ensure_future(_show_output(started.process.stdout, say))
        self._asking = asyncio.Lock()
        self._importing: asyncio.Future[dict[str, Any]]
        self._import(self._ask("import", b"", (), _IMPORT_TIMEOUT))

    @property
    def ready(self) -> bool:
        return self._importing.done() and self.is_running

    def _import(self, answering: Coroutine[Any, Any, dict[str, Any]]) -> None:
        self._importing = asyncio.ensure_future(answering)
        self._importing.add_done_callback(self._has_imported)

    def lead(self, run: RunSpec, count: int) -> None:
        """Begin to execute the leading statements of a run's program; the ranks of other programs need another zygote.

        The zygote must fit the run without them.
        """
        program = run.command.program_of(0)
        self.signature = run.signature(count)
        before = self._importing

        async def lead() -> dict[str, Any]:
            order = {
                "op": "lead",
                "mode": program.mode,
                "target": program.target,
                "path": await asyncio.to_thread(source_path, program.mode, program.target, run.cwd or os.getcwd()),
                "cwd": run.cwd,
                "env": run.added_for_imports,
                "statements": run.leading,
            }
            line = json.dumps(order).encode() + b"\n"
            return {**await before, **await self._ask("lead", line, (), _IMPORT_TIMEOUT)}

        self._import(lead())

    async def is_current(self, path0: str) -> bool:
        """Return whether a program in a folder would import the files that its leading statements have imported."""
        return bool((await self.ask({"op": "check", "path0": path0})).get("current"))

    async def imports(self) -> dict[str, Any]:
        """Wait for the import of the modules; return the answer (see ``zygote_main``)."""
        answer = await asyncio.shield(self._importing)
        if "error" in answer:
            raise ZygoteError(f"the zygote (pid {self.pid}) has failed: {answer['error']}")
        return answer

    async def ask(self, order: Mapping[str, Any], passed: Sequence[int] = ()) -> dict[str, Any]:
        """Send an order (see ``zygote_main``) and descriptors, after the import of the modules; return the answer."""
        await self.imports()
        return await self._ask(order["op"], json.dumps(order).encode() + b"\n", passed, _ORDER_TIMEOUT)

    async def fork(self, processes: Sequence[tuple[Rank | StoreProcess, Mapping[str, Any]]]) -> None:
        """Start processes that have not begun, with their descriptions (see ``zygote_main``).

        ``LaunchError`` says which one cannot be started, and why.
        """
        for first in range(0, len(processes), _FORKS_PER_ORDER):
            part, passed, described = processes[first : first + _FORKS_PER_ORDER], list[int](), []
            for process, description in part:
                given = process.given
                described.append({**description, "files": [*range(len(passed), len(passed) + len(given))]})
                passed += given
            order = {"op": "fork", "processes": described}
            waits, go = os.pipe()
            try:
                answer = await self.ask(order, [*passed, waits])
                answers = answer.get("processes", [answer] * len(part))  # one error, if the zygote cannot fork
                failures = []
                for (process, description), begun in zip(part, answers, strict=True):
                    if "pid" in begun:
                        process.begin(begun["pid"])
                    else:
                        failures.append(f"{_name(description)}: {begun['error']}")
                if failures:
                    raise LaunchError(f"cannot start {failures[0]}")
                os.write(go, bytes(len(part)))
            finally:
                # A rank that finds no byte ends: no program runs in a process that this host does not know.
                os.close(waits)
                os.close(go)

    def close(self) -> None:
        """End the zygote, which fits no run from now on; its forks run on."""
        self.signature = None
        self._showing.cancel()
        self.send(signal.SIGKILL)
        if not self._asking.locked():  # else the request that waits finds the end of the channel, and closes it
            self._channel.close()

    def _has_imported(self, done: asyncio.Future[dict[str, Any]]) -> None:
        self.imported = (self._started, time.time())
        if not done.cancelled():
            done.exception()  # that of a zygote that nobody needs any more

    async def _ask(self, op: str, line: bytes, passed: Sequence[int], timeout: float) -> dict[str, Any]:
        """Send the line of an order, if it has not been sent, and wait for the answer."""
        try:
            async with self._asking:
                try:
                    return await self._send_and_receive(line, passed, timeout)
                except BaseException:
                    self._channel.close()
                    raise
        except asyncio.TimeoutError:
            why = f"has not answered {op!r} for {timeout:g} s"  # its state is unknown
        except (OSError, EOFError):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.wait(), 1.0)  # it is ending: its end of the channel is closed
            why = "has closed its channel" if self.returncode is None else describe_code(self.returncode)
        self.close()
        raise ZygoteError(f"the zygote (pid {self.pid}) {why}")

    async def _send_and_receive(self, line: bytes, passed: Sequence[int], timeout: float) -> dict[str, Any]:
        loop, buffer = asyncio.get_running_loop(), b""
        sent = socket.send_fds(self._channel, [line], passed) if passed else 0
        await asyncio.wait_for(loop.sock_sendall(self._channel, line[sent:]), timeout)
        while not buffer.endswith(b"\n"):
            data = await asyncio.wait_for(loop.sock_recv(self._channel, 65536), timeout)
            if not data:
                raise EOFError
            buffer += data
        answer: dict[str, Any] = json.loads(buffer)
        return answer


class Zygotes:
    """Keep the zygotes of a host: one for each kind of run, the first one of which may have been started early."""

    def __init__(self, say: Callable[[str], None], early: ZygoteProcess | None = None) -> None:
        processes.raise_file_limit()
        # Files of this process and of Monarch's processes are private to the user; ranks keep the user's umask.
        self._umask = os.umask(0o077)
        self._say = say
        self._early = early
        self._zygotes: list[Zygote] = []  # the one that was used last is the last

    @property
    def ready(self) -> bool:
        return any(zygote.ready for zygote in self._zygotes)

    def fitting(self, run: RunSpec, count: int) -> Zygote:
        """Return a zygote for a run of a number of ranks on this host; start one if there is none, or if it has ended.

        Raises:
            LaunchError: it cannot be started.
        """
        signature = run.signature(count)
        running = (zygote for zygote in self._zygotes if zygote.signature == signature and zygote.is_running)
        found = next(running, None)
        if found is None and run.leading:
            found = self.fitting(run.without_leading(), count)
            found.lead(run, count)
        try:
            zygote = found or Zygote(self._start(run, count), self._say)
        except OSError as error:
            python = run.zygote_command()[0]
            reason = f"cannot start the Python interpreter {python!r}: {error.strerror}{processes.limit_hint(error)}"
            raise LaunchError(reason) from None
        others = [other for other in self._zygotes if other is not zygote]
        newest = [other for other in others if other.is_running][1 - _MAX_ZYGOTES :]
        for other in others:
            if other not in newest:
                other.close()
        self._zygotes = [*newest, zygote]
        return zygote

    def _start(self, run: RunSpec, count: int) -> ZygoteProcess:
        early, self._early = self._early, None
        if early is not None and early.signature == run.signature(count):
            return early
        if early is not None:
            with early.process, early.channel:  # closes its output, too
                children.Child(early.process.pid).send(signal.SIGKILL)
        return ZygoteProcess(run, count, self._umask)


async def _show_output(pipe: IO[bytes], say: Callable[[str], None]) -> None:
    """Show what a zygote prints, such as warnings of the modules that it imports, as progress lines."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    with contextlib.closing(transport):
        while not reader.at_eof():
            with contextlib.suppress(ValueError):  # a line of more than 64 kB
                if line := (await reader.readline()).rstrip():
                    say(f"the ranks' imports: {line.decode(errors='replace')}")


def _name(description: Mapping[str, Any]) -> str:
    """Return what an error calls the process of a description (see ``zygote_main``)."""
    if "store" in description:
        return "the ranks' TCPStore"
    if description["python"]:
        return f"the Python interpreter {description['python'][0]!r}"
    return f"rank {description['env']['RANK']}"
