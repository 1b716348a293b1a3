# SPDX-License-Identifier: BSD-3-Clause
"""The process of a rank, a child of the host that a zygote has forked, and the orphans that ranks leave behind.

The host is the subreaper of its descendants: orphans become its children, not PID 1's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.system import processes

_LEFTOVERS_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that an ended rank has left in its process group."""

_OUTPUT_TIMEOUT = 1.5
"""Seconds for reading the output of a rank when no process of it is left that can be found."""

_REAP_EVERY = 5.0


def watch_child(pid: int, on_end: Callable[[int], None]) -> None:
    """Reap a child of this process when it ends, and call a function with its exit code, -n for death by signal n."""
    loop = asyncio.get_running_loop()

    def reap() -> None:
        on_end(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # reaped by the loop, which signals the pid until it knows
        with contextlib.suppress(RuntimeError):  # the loop is closed: the host process is ending
            loop.call_soon_threadsafe(reap)

    # Not in the default executor, which has fewer threads than a host may have ranks.
    threading.Thread(target=wait, daemon=True).start()


class RankProcess:
    """Control the process of one rank, or of a command. Its output pipes exist before the process.

    Args:
        on_first_output: called when it first prints, once for each of its streams.
        started: a process that runs already; None for one that a zygote is to fork.

    Attributes:
        pid: 0 before ``begin``.
        returncode: negative for a signal; None before ``ended`` is set.
        ended_at: seconds since the epoch; 0 before.
        cleared: set when the process group has no process left.
        stacks: a file without a name through which the rank, and the children that it forks, give their stacks to the
            host; closed when the rank is. They share its position, which the host sets to the start before each
            request, so that it does not grow.
        stacks_lock: held by a request for stacks, from the first signal to the last read.
    """

    def __init__(self, on_first_output: Callable[[], None], started: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.ended = asyncio.Event()
        self.ended_at = 0.0
        self.cleared = asyncio.Event()
        self.stacks_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[Any]] = []  # asyncio keeps only weak references to tasks
        with contextlib.ExitStack() as unfinished:
            # In memory where Python has ``memfd_create``, which a Python for any glibc has not.
            if hasattr(os, "memfd_create"):
                self.stacks = os.fdopen(os.memfd_create("stacks"), "r+b", 0)
            else:
                self.stacks = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            unfinished.callback(self.stacks.close)
            self._write_ends: tuple[int, ...] = ()
            if started is None:
                stdout, out = os.pipe()
                for end in (stdout, out):
                    unfinished.callback(os.close, end)
                stderr, err = os.pipe()
                self._write_ends = out, err
                pipes: Sequence[Any] = os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0)
            else:
                pipes = started.stdout, started.stderr
            unfinished.pop_all()
        ends_lines = started is None  # the output of a command is its own
        self.stdout, self.stderr = (OutputPipe(pipe, on_first_output, ends_lines=ends_lines) for pipe in pipes)
        if started is not None:
            self.begin(started.pid)

    @property
    def given(self) -> tuple[int, ...]:
        """What the zygote gives to the process: the other ends of stdout and stderr, and the file for stacks."""
        return (*self._write_ends, self.stacks.fileno())

    def begin(self, pid: int) -> None:
        """Watch the process, which runs now, as a child of this one that leads a process group."""
        self.pid = pid
        self._close_write_ends()
        watch_child(pid, self._has_ended)

    def release(self) -> None:
        self.stdout.release()
        self.stderr.release()

    def discard(self) -> None:
        """Close the pipes of a process that has not begun; kill one that has."""
        self.release()
        if self.pid:
            self.kill(signal.SIGKILL)
            self._tasks.append(asyncio.ensure_future(self.drain()))
            return
        self._close_write_ends()
        self.stacks.close()
        self.stdout.close()
        self.stderr.close()

    def kill(self, number: int) -> None:
        """Send a signal to the whole process group, which may outlive the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            if number != signal.SIGKILL:  # a stopped process handles no other signal
                os.killpg(self.pid, signal.SIGCONT)

    def _close_write_ends(self) -> None:
        ends, self._write_ends = self._write_ends, ()
        for end in ends:
            os.close(end)

    def _has_ended(self, code: int) -> None:
        self.returncode = code
        self.ended_at = time.time()
        self.ended.set()
        self._tasks.append(asyncio.ensure_future(self._clear_up()))

    async def _clear_up(self) -> None:
        """End the processes that are left in the process group."""
        for number, seconds in ((None, 0.1), (signal.SIGTERM, _LEFTOVERS_GRACE), (signal.SIGKILL, 0.5)):
            if number is not None:
                self.kill(number)
            until = time.monotonic() + seconds
            while (is_left := self._has_group()) and time.monotonic() < until:
                await asyncio.sleep(0.01)
            if not is_left:
                break
        self.cleared.set()

    def _has_group(self) -> bool:
        """Reap the ended processes of the process group, which this process has adopted; return whether others live."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
            return True
        return False

    async def drain(self) -> None:
        """When the process group is gone, read the output to its end, and close it even if others hold the pipes."""
        await self.cleared.wait()
        ends = [asyncio.ensure_future(output.ended.wait()) for output in (self.stdout, self.stderr)]
        _, waiting = await asyncio.wait(ends, timeout=_OUTPUT_TIMEOUT)
        for task in waiting:
            task.cancel()
        self.stacks.close()
        self.stdout.close()
        self.stderr.close()


@dataclasses.dataclass
class Rank:
    """One rank of an attempt, or a command. ``directory`` is that of its logs, None for no files.

    Times are seconds since the epoch. ``stopped_at`` is when it was decided to stop the rank, which may be some time
    before ``is_signalled``.
    """

    process: RankProcess
    rank: int
    local_rank: int
    directory: Path | None
    attempt: int = 0
    error_file: str = ""
    started: float = dataclasses.field(default_factory=time.time)
    stopped_at: float | None = None
    is_signalled: bool = False

    @property
    def is_running(self) -> bool:
        return not self.process.ended.is_set()


async def reap_orphans() -> None:
    """Reap orphan processes that have ended; runs until cancelled.

    A child is reaped only when two checks, 5 s apart, find it dead: this package reaps the children that it has started
    much earlier than that.
    """
    seen: set[int] = set()
    while True:
        await asyncio.sleep(_REAP_EVERY)
        dead = processes.dead_children()
        for pid in dead & seen:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        seen = dead - seen


async def end_orphans(job: str, ours: Collection[int]) -> None:
    """End the processes that ended ranks have left behind, in whatever session or process group."""
    # Every rank leads a session. The processes that the host has started for others are in its own.
    keep = {os.getsid(0), *map(_session, ours)}

    def find() -> list[int]:
        return [pid for pid in processes.descendants(os.getpid(), job) if _session(pid) not in keep]

    for pause in processes.terminate(find):
        await asyncio.sleep(pause)
    processes.kill_until_gone(find)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return os.getsid(0)
