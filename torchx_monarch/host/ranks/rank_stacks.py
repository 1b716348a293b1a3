# SPDX-License-Identifier: BSD-3-Clause
"""Take the stacks of ranks and of the processes that they have started.

A process that inherits a rank's handler and file, as a forked worker of a DataLoader does, writes its stacks itself,
without the GIL. /proc says why another one cannot: it is stopped, for example, or no fork of the rank.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable

from torchx_monarch.host.ranks.rank_main import OWN_FILES, STACKS_SIGNAL
from torchx_monarch.host.ranks.rank_process import RankProcess
from torchx_monarch.host.ranks.stacks_file import SIZE
from torchx_monarch.insight.stacks import ProcessStacks, ThreadStack, parse_faulthandler, parse_py_spy
from torchx_monarch.system import process_status, processes
from torchx_monarch.system.untrusted_text import one_line

_BYTES_IN_ALL = 1 << 20
"""Bytes of text that are read of the ranks of one host. As JSON, in one message, they are several times as many."""

_MAX_CHILDREN = 64
"""Processes started by one rank that are asked for their stacks."""

_PY_SPY_TIMEOUT = 10.0
"""Seconds for py-spy to read one process: it reads the symbols of all libraries, those of torch among them."""

_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "a zombie: it has ended, and its parent has not noticed",
    "X": "dead",
}
"""The states in which a process executes no handler, however long one waits."""


async def take_stacks(
    ranks: Iterable[tuple[int, RankProcess]], replica: int, marker: str, timeout: float, native: bool = False
) -> list[ProcessStacks]:
    """Take the stacks of ranks, all at once, and of the processes that they have started.

    Args:
        ranks: global rank and process of each.
        replica: the replica that they belong to.
        marker: value of the app's marker variable (``processes.MARKER``).
        timeout: seconds for all processes of one rank.
        native: whether py-spy reads them as well, with the C functions; ``timeout`` does not count for that.
    """
    ranks = [(rank, process) for rank, process in ranks if not process.ended.is_set()]
    limit = min(SIZE, _BYTES_IN_ALL // max(1, len(ranks)))
    takers = [_Taker(rank, replica, process, time.monotonic() + timeout, limit) for rank, process in ranks]
    found = [stacks for taken in await asyncio.gather(*(taker.take(marker) for taker in takers)) for stacks in taken]
    if not native:
        return found
    loop = asyncio.get_running_loop()
    return list(await asyncio.gather(*(loop.run_in_executor(None, _with_native, stacks) for stacks in found)))


class _Taker:
    """Take the stacks of one rank's processes, one after the other: they write to the same file."""

    def __init__(self, rank: int, replica: int, process: RankProcess, until: float, limit: int) -> None:
        self._rank = rank
        self._replica = replica
        self._process = process
        self._file = process.stacks
        self._until = until
        self._limit = limit

    async def take(self, marker: str) -> list[ProcessStacks]:
        try:
            await asyncio.wait_for(self._file.lock.acquire(), self._until - time.monotonic())
        except asyncio.TimeoutError:
            return [self._result(self._process.pid, "", problem="another request for its stacks has not ended")]
        try:
            found = [await self._of(self._process.pid, "")]
            for pid in processes.descendants(self._process.pid, marker)[:_MAX_CHILDREN]:
                if (status := process_status.status(pid)) is not None:
                    found.append(await self._of(pid, one_line(status.name) or "?"))
        finally:
            self._file.lock.release()
        return [stacks for stacks in found if stacks is not None]

    def _result(self, pid: int, child: str, threads: tuple[ThreadStack, ...] = (), problem: str = "") -> ProcessStacks:
        return ProcessStacks(self._rank, self._replica, pid, child, threads, problem)

    async def _of(self, pid: int, child: str) -> ProcessStacks | None:
        """Take the stacks of one process; None if it is gone."""
        status, identity = process_status.status(pid), processes.identity(pid)
        if status is None or not self._file.is_open:
            return None
        if status.state in _STATES or identity is None:
            return self._result(pid, child, problem=_STATES.get(status.state, _STATES["Z"]))
        # Without a handler the signal would end the process. A program that is executed has neither handler nor file.
        if not status.caught & 1 << STACKS_SIGNAL - 1 or not process_status.has_open(pid, self._file.descriptor):
            why = "not a fork of the rank" if child else "not a Python program, or not started yet"
            return self._result(pid, child, problem=f"no stacks: {why}; it is {_doing(status)}")
        before = process_status.blocking(pid, STACKS_SIGNAL)
        if before.issuperset(process_status.threads(pid)):
            return self._result(pid, child, problem="blocks the signal that asks for stacks")
        self._file.rewind()
        if not processes.send(identity, STACKS_SIGNAL):
            return None
        pause = 0.001
        while not self._has_answered(pid, before):
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.02)
            if not self._file.is_open or (status := process_status.status(pid)) is None:
                return None
            if time.monotonic() > self._until:
                return self._result(pid, child, self._read(), f"has not answered; it is {_doing(status, pid)}")
        return self._result(pid, child, self._read())

    def _has_answered(self, pid: int, before: set[int]) -> bool:
        """Return whether the handler has been executed.

        Args:
            pid: process id.
            before: the threads that blocked the signal already.
        """
        status = process_status.status(pid)
        if status is None or status.pending & 1 << STACKS_SIGNAL - 1:
            return False
        # Between the arrival of the signal and the start of its handler it is neither pending nor blocked.
        if not self._file.is_open or not self._file.written:
            return False
        return process_status.blocking(pid, STACKS_SIGNAL) <= before

    def _read(self) -> tuple[ThreadStack, ...]:
        return parse_faulthandler(self._file.read()[: self._limit], OWN_FILES)


def _doing(status: process_status.KernelStatus, pid: int = 0) -> str:
    """Describe what a process is doing.

    Args:
        status: its status.
        pid: process id, to name the function of the kernel in which it waits; 0 not to.
    """
    if status.state in _STATES:
        return _STATES[status.state]
    words = {"R": "running", "S": "sleeping", "D": "uninterruptible, inside the kernel"}
    where = process_status.waits_in(pid) if pid and status.state == "D" else ""
    word = words.get(status.state, f"in state {one_line(status.state)}")
    return f"{word} ({one_line(where, 60)})" if where else word


# -- py-spy ------------------------------------------------------------------------------------------------------------


def _with_native(stacks: ProcessStacks) -> ProcessStacks:
    """Return the stacks of a process as py-spy reads them, or the same with the reason why it does not."""
    status = process_status.status(stacks.pid)
    if status is None or status.state in _STATES:
        return stacks
    try:
        threads = _read_native(stacks.pid)
    except ValueError as error:
        also = f"{stacks.problem}; " if stacks.problem else ""
        return dataclasses.replace(stacks, problem=f"{also}no native stacks: {error}")
    return dataclasses.replace(stacks, threads=threads, problem="")


def _read_native(pid: int) -> tuple[ThreadStack, ...]:
    """Have py-spy read the stacks of a process.

    Raises:
        ValueError: it is not installed, may not read the process, or is too slow.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        raise ValueError("py-spy is not installed on this host (pip install py-spy)")
    try:
        command = [program, "dump", "--pid", str(pid), "--native", "--json"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PY_SPY_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ValueError(f"py-spy has not read it within {_PY_SPY_TIMEOUT:g} s") from None
    except OSError as error:
        raise ValueError(f"cannot execute {program}: {error.strerror}") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"py-spy: {one_line(said[0], 200)}")
    return parse_py_spy(done.stdout.decode(errors="replace"), pid, OWN_FILES)
