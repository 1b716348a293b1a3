# SPDX-License-Identifier: BSD-3-Clause
"""The process of a rank: a child of the host that a zygote has forked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.host.ranks.stacks_file import StacksFile

_LEFTOVERS_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that an ended rank has left in its process group."""

_OUTPUT_TIMEOUT = 1.5
"""Seconds for reading the output of a rank when no process of it is left that can be found."""


class RankProcess:
    """Control the process of one rank. Its output pipes exist before the process.

    Attributes:
        pid: process id; 0 before ``begin``.
        returncode: exact exit code, negative for a signal, once ``ended`` is set; None before.
        stdout: reader of the process's stdout.
        stderr: reader of the process's stderr.
        stacks: the file to which the process, and its forked children, write their stacks.
        ended: set when the process has ended.
        ended_at: time of the end, in seconds since the epoch; 0 before.
        cleared: set when the process group has no process left.

    Args:
        on_first_output: called for each of the two streams when the program first prints to it.

    Raises:
        OSError: the pipes or the file cannot be made.
    """

    def __init__(self, on_first_output: Callable[[], None]) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.ended = asyncio.Event()
        self.ended_at = 0.0
        self.cleared = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []  # asyncio keeps only weak references to tasks
        with contextlib.ExitStack() as unfinished:
            self.stacks = StacksFile()
            unfinished.callback(self.stacks.close)
            stdout, out = os.pipe()
            for end in (stdout, out):
                unfinished.callback(os.close, end)
            stderr, err = os.pipe()
            unfinished.pop_all()
        self._write_ends: tuple[int, ...] = (out, err)
        self.stdout = OutputPipe(os.fdopen(stdout, "rb", 0), on_first_output)
        self.stderr = OutputPipe(os.fdopen(stderr, "rb", 0), on_first_output)

    @property
    def given(self) -> tuple[int, ...]:
        """What the zygote gives to the process: the other ends of stdout and stderr, and the file for stacks."""
        return (*self._write_ends, self.stacks.descriptor)

    def begin(self, pid: int) -> None:
        """Watch the process, which runs now.

        Args:
            pid: process id; the process is a child of this one and leads a process group.
        """
        self.pid = pid
        self._close_write_ends()
        try:
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # Python or kernel without pidfds, or a container that forbids them
            # Not in a thread of the default executor, which has fewer than a host may have ranks.
            threading.Thread(target=self._wait, args=(asyncio.get_running_loop(),), daemon=True).start()
            return
        asyncio.get_running_loop().add_reader(pidfd, self._pidfd_readable, pidfd)

    def release(self) -> None:
        """Pass on the output, which is held until now."""
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

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self, number: int) -> None:
        """Send a signal to the whole process group, which may outlive the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _close_write_ends(self) -> None:
        ends, self._write_ends = self._write_ends, ()
        for end in ends:
            os.close(end)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        status = os.waitpid(self.pid, 0)[1]
        with contextlib.suppress(RuntimeError):  # the loop is closed: the host process is ending
            loop.call_soon_threadsafe(self._has_ended, status)

    def _pidfd_readable(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._has_ended(os.waitpid(self.pid, 0)[1])

    def _has_ended(self, status: int) -> None:
        self.returncode = os.waitstatus_to_exitcode(status)
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
