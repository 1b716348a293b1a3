# SPDX-License-Identifier: BSD-3-Clause
"""Take the stacks of ranks and of the processes that they have started, for clients and for ``attempt_N/stacks.txt``.

Profiles are py-spy's, which samples stacks without stopping a rank.

A process that inherits a rank's handler and file, as a forked worker of a DataLoader does, writes its stacks itself,
without the GIL. /proc says why another one cannot: it is stopped, for example, or no fork of the rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from torchx_monarch.host.ranks.rank_main import OWN_FILES, STACKS_SIGNAL
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.insight.profile import RankProfile, parse_collapsed
from torchx_monarch.insight.stacks import KernelWait, ProcessStacks, ThreadStack, parse_faulthandler, render
from torchx_monarch.system import children, process_status, processes, safe_files
from torchx_monarch.system.console import WriterThread
from torchx_monarch.system.untrusted_text import one_line

NAME = "stacks.txt"

_MAX_SIZE = 1 << 18
"""Bytes of text that are read of one process: a hundred threads of a hundred frames have a few times less."""

_MAX_SIZE_OF_HOST = 1 << 20
"""The same of all ranks of one host. As JSON, in one message, they are several times as many."""

_MAX_CHILDREN = 64
"""Processes started by one rank that are asked for their stacks."""

_MAX_FILE = 1 << 20
"""Size of ``stacks.txt`` from which on nothing is added."""

_STOP_TIMEOUT = 0.5
"""Seconds by which a rank that does not answer delays the signal that stops the ranks. Those that answer take some
milliseconds."""

_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "a zombie: it has ended, and its parent has not noticed",
    "X": "dead",
}
"""The states in which a process executes no handler, however long one waits."""


class RankStacks:
    """Take the stacks of the ranks of a host, and write them into the folders of their attempts."""

    def __init__(self, replica: int, hostname: str, marker: str, disk: WriterThread) -> None:
        self._replica = replica
        self._host = f"host {replica} ({hostname})"
        self._marker = marker
        self._disk = disk
        self._writing: asyncio.Task[None] | None = None

    async def take(self, ranks: Iterable[Rank], timeout: float) -> list[ProcessStacks]:
        """Take the stacks of ranks that run, all at once, and of the processes that they have started."""
        ranks = [rank for rank in ranks if rank.is_running]
        limit = min(_MAX_SIZE, _MAX_SIZE_OF_HOST // max(1, len(ranks)))
        takers = [_Taker(rank, self._replica, time.monotonic() + timeout, limit) for rank in ranks]
        taken = await asyncio.gather(*(taker.take(self._marker) for taker in takers))
        return [stacks for of_rank in taken for stacks in of_rank]

    async def write_before(self, number: int, ranks: Sequence[Rank], folder: Path) -> None:
        """Write the stacks of ranks into the folder of their attempt before a signal stops them.

        It returns within about ``_STOP_TIMEOUT``, also without them. If they are being written already, it waits for
        that.
        """

        async def write() -> None:
            self.add(folder, await self.take(ranks, _STOP_TIMEOUT), f"before {signal.Signals(number).name}")

        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(write())
        # Not cancelled with a caller: another one may wait for it.
        await asyncio.wait([self._writing], timeout=2 * _STOP_TIMEOUT)

    def add(self, folder: Path, stacks: Sequence[ProcessStacks], title: str) -> None:
        """Write stacks, if there are any, into the folder of an attempt; the title says when they were taken."""
        lines, now = render(stacks), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        if not lines:
            return
        text = "\n".join([f"{self._host}, {one_line(title)}, {now} UTC:", *lines, "", ""])
        self._disk.call(_append, folder / NAME, text.encode(errors="backslashreplace"))


def _append(path: Path, text: bytes) -> None:
    """Append a text by one write, unless the file is long: hosts may share the folder."""
    with contextlib.suppress(OSError):
        file = safe_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, below=path.parent.parent)
        try:
            if os.fstat(file).st_size < _MAX_FILE:
                os.write(file, text)
        finally:
            os.close(file)


class _Taker:
    """Take the stacks of one rank's processes, one after the other: they write to the same file."""

    def __init__(self, rank: Rank, replica: int, until: float, limit: int) -> None:
        self._rank = rank
        self._replica = replica
        self._file = rank.stacks
        self._until = until
        self._limit = limit

    async def take(self, marker: str) -> list[ProcessStacks]:
        try:
            await asyncio.wait_for(self._rank.stacks_lock.acquire(), self._until - time.monotonic())
        except asyncio.TimeoutError:
            return [self._result(self._rank.pid, "", problem="another request for its stacks has not ended")]
        try:
            found = [await self._described(self._rank.pid, "")]
            for pid in processes.descendants(self._rank.pid, marker)[:_MAX_CHILDREN]:
                if (status := process_status.status(pid)) is not None:
                    found.append(await self._described(pid, one_line(status.name) or "?"))
        finally:
            self._rank.stacks_lock.release()
        return [stacks for stacks in found if stacks is not None]

    def _result(self, pid: int, child: str, threads: tuple[ThreadStack, ...] = (), problem: str = "") -> ProcessStacks:
        return ProcessStacks(self._rank.rank, self._replica, pid, child, threads, problem)

    async def _described(self, pid: int, child: str) -> ProcessStacks | None:
        """Take the stacks of one process, and before that what its main thread does in the kernel."""
        status = process_status.status(pid)
        call = process_status.system_call(pid) if status is not None and status.state != "R" else ("", "")
        found = await self._stacks_of(pid, child)
        return found and status and replace(found, wait=KernelWait(one_line(status.state), *call))

    async def _stacks_of(self, pid: int, child: str) -> ProcessStacks | None:
        """Take the stacks of one process; None if it is gone."""
        status, identity = process_status.status(pid), processes.identity(pid)
        if status is None or self._file.closed:
            return None
        if status.state in _STATES or identity is None:
            return self._result(pid, child, problem=_STATES.get(status.state, _STATES["Z"]))
        # Without a handler the signal would end the process. A program that is executed has neither handler nor file.
        if not status.caught & 1 << STACKS_SIGNAL - 1 or not process_status.has_open(pid, self._file.fileno()):
            why = "not a fork of the rank" if child else "not a Python program, or not started yet"
            return self._result(pid, child, problem=f"no stacks: {why}; it is {_doing(pid, status)}")
        before = process_status.blocking(pid, STACKS_SIGNAL)
        if before.issuperset(process_status.threads(pid)):
            return self._result(pid, child, problem="blocks the signal that asks for stacks")
        self._file.seek(0)
        if not processes.send(identity, STACKS_SIGNAL):
            return None
        pause = 0.001
        while not self._has_answered(pid, before):
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.02)
            if self._file.closed or (status := process_status.status(pid)) is None:
                return None
            if time.monotonic() > self._until:
                return self._result(pid, child, self._read(), f"has not answered; it is {_doing(pid, status)}")
        return self._result(pid, child, self._read())

    def _has_answered(self, pid: int, before: set[int]) -> bool:
        """Return whether the handler has been executed; the threads ``before`` have blocked the signal already."""
        status = process_status.status(pid)
        if status is None or status.pending & 1 << STACKS_SIGNAL - 1:
            return False
        # Between the arrival of the signal and the start of its handler it is neither pending nor blocked.
        if self._file.closed or not self._file.tell():
            return False
        return process_status.blocking(pid, STACKS_SIGNAL) <= before

    def _read(self) -> tuple[ThreadStack, ...]:
        size = min(self._file.tell(), self._limit)
        return parse_faulthandler(os.pread(self._file.fileno(), size, 0).decode(errors="replace"), OWN_FILES)


def _doing(pid: int, status: process_status.KernelStatus) -> str:
    if status.state == "D" and (where := process_status.kernel_wait(pid)):
        return f"uninterruptible, inside the kernel: {where}"
    words = {**_STATES, "R": "running", "S": "sleeping", "D": "uninterruptible, inside the kernel"}
    return words.get(status.state, f"in state {one_line(status.state)}")


# -- profiles ----------------------------------------------------------------------------------------------------------

_RATE = 100
"""Samples a second."""

_MAX_PROFILES = 1 << 22
"""Bytes of the stacks of all ranks of one host as JSON: they are one message (``messages.MAX_MESSAGE``)."""

_MAX_OUTPUT = 1 << 26
"""Bytes that are read of what py-spy has written."""

_MARGIN = 20.0
"""Seconds in which py-spy must begin and end: it reads the symbols of all libraries, those of torch among them."""


async def profile(ranks: Sequence[Rank], replica: int, seconds: float, idle: bool) -> list[RankProfile]:
    """Profile ranks that run, all at the same time.

    Args:
        idle: whether threads that wait are sampled, too.
    """
    running = [RankProfile(rank.rank, replica, rank.pid) for rank in ranks if rank.is_running]
    limit = _MAX_PROFILES // max(1, len(running))
    return await asyncio.gather(*(_sampled(rank, seconds, idle, limit) for rank in running))


async def _sampled(rank: RankProfile, seconds: float, idle: bool, limit: int) -> RankProfile:
    """Add the stacks of a rank to its profile, at most ``limit`` bytes as JSON, or the reason why there are none."""
    options = ["--duration", str(max(1, round(seconds))), "--rate", str(_RATE), *(["--idle"] if idle else [])]
    with contextlib.ExitStack() as stack:
        try:
            # Files without a name: what py-spy prints may be long, and nobody reads it meanwhile.
            samples, said = (stack.enter_context(safe_files.nameless_file()) for _ in range(2))
            options += ["--nonblocking", "--full-filenames", "--output", f"/proc/self/fd/{samples.fileno()}"]
            process, _ = children.start(
                [await asyncio.to_thread(_py_spy), "record", "--pid", str(rank.pid), "--format", "raw", *options],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[samples.fileno()],
            )
        except (OSError, ValueError) as error:
            return replace(rank, problem=str(error))
        try:
            await asyncio.wait_for(process.wait(), seconds + _MARGIN)
        except asyncio.TimeoutError:
            return replace(rank, problem=f"py-spy has not ended {_MARGIN:g} s after the time was over")
        finally:
            process.send(signal.SIGKILL)
        text = await asyncio.to_thread(_text, samples)
        if found := await asyncio.to_thread(parse_collapsed, text, limit, OWN_FILES):  # megabytes
            return replace(rank, samples=found)
        lines = (await asyncio.to_thread(_text, said)).strip().splitlines()
        errors = [line for line in lines if line.startswith("Error")]
        why = "" if process.returncode else "none of its threads was busy (--idle shows those that wait)"
        return replace(rank, problem=why or f"py-spy: {one_line((errors or lines or ['it failed'])[0], 200)}")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT).decode(errors="replace")


def _py_spy() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        raise ValueError("py-spy is not installed on this host (pip install py-spy)")
    return program
