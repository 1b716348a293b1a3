# SPDX-License-Identifier: BSD-3-Clause
"""A rank, a child of the host that a zygote has forked, or a command. Its pipes exist before its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.system import process_status
from torchx_monarch.system.children import Child
from torchx_monarch.system.safe_files import nameless_file

if TYPE_CHECKING:
    from torchx_monarch.host.ranks.flight_recorders import RecorderConnection

_OUTPUT_TIMEOUT = 1.5
"""Seconds for reading the output of a rank when no process of it is left that can be found."""


class Rank(Child):
    """One rank of an attempt, or a command. Its process leads a process group.

    Args:
        on_first_output: called when it first prints, once for each of its streams.
        process: its process, if that runs already; None for one that a zygote is to fork.

    Attributes:
        directory: the folder of its logs; None for no files.
        error_file: the path of its error file; empty for none.
        started: in seconds since the epoch.
        stopped_at: when it was decided to stop it, which may be some time before the signal.
        signal: the last one that it has got in order to stop; 0 for none.
        recorder: the connection to its flight recorder; None without a process group.
        grouped: when it formed its first process group.
        failure: when it reported, with a process group, that its program had failed, and the exit code.
        timer: the name of torchelastic's timer that it has let expire; empty for none.
        stacks: a file without a name through which the rank, and the children that it forks, give their stacks to the
            host; closed when the rank is. They share its position, which the host sets to the start before each
            request, so that it does not grow.
        stacks_lock: held by a request for stacks, from the first signal to the last read.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        on_first_output: Callable[[], None],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.local_rank = local_rank
        self.directory: Path | None = None
        self.error_file = ""
        self.started = time.time()
        self.stopped_at: float | None = None
        self.signal = 0
        self.recorder: RecorderConnection | None = None
        self.grouped: float | None = None
        self.failure: tuple[float, int] | None = None
        self.timer = ""
        self.stacks_lock = asyncio.Lock()
        self._kernel_wait: tuple[int, float] | None = None
        """How often its process had left the processor when it was first seen waiting inside the kernel, and when."""
        self._draining: asyncio.Task[None] | None = None  # asyncio keeps only weak references to tasks
        with contextlib.ExitStack() as unfinished:
            self.stacks = nameless_file()
            unfinished.callback(self.stacks.close)
            if process is None:
                self.given = (os.dup(self.stacks.fileno()),)
                unfinished.callback(self.close_given)
                stdout, out = os.pipe()
                for end in (stdout, out):
                    unfinished.callback(os.close, end)
                stderr, err = os.pipe()
                self.given = out, err, *self.given
                pipes: Sequence[Any] = os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0)
            else:
                pipes = process.stdout, process.stderr
            unfinished.pop_all()
        ends_lines = process is None  # the output of a command is its own
        self.stdout, self.stderr = (OutputPipe(pipe, on_first_output, ends_lines=ends_lines) for pipe in pipes)
        if process is not None:
            self.begin(process.pid)

    @property
    def last_active(self) -> float:
        """When it began, or has last printed something."""
        return max(self.started, self.stdout.last_at, self.stderr.last_at)

    def kernel_wait(self) -> float:
        """Return for how many seconds it is known to wait inside the kernel, where it handles no signal; 0 if not."""
        status = process_status.status(self.pid)
        if status is None or status.state != "D":
            self._kernel_wait = None
        elif self._kernel_wait is None or self._kernel_wait[0] != status.switches:
            self._kernel_wait = status.switches, time.monotonic()
        return 0.0 if self._kernel_wait is None else time.monotonic() - self._kernel_wait[1]

    def release(self) -> None:
        self.stdout.release()
        self.stderr.release()

    def discard(self) -> None:
        """Close the pipes of a process that has not begun; kill one that has."""
        self.release()
        if self.pid:
            self.kill(signal.SIGKILL)
            self._draining = asyncio.ensure_future(self.drain())
            return
        self.close_given()
        self.stacks.close()
        self.stdout.close()
        self.stderr.close()

    def kill(self, number: int) -> None:
        """Send a signal to the whole process group, unless the process has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
                if number != signal.SIGKILL:  # a stopped process handles no other signal
                    os.killpg(self.pid, signal.SIGCONT)

    async def read_output(self, timeout: float) -> None:
        """Wait until the output has been read to its end, at most so many seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(self.stdout.ended.wait(), self.stderr.ended.wait()), timeout)

    async def drain(self) -> None:
        """When the process has ended, read the output to its end, and close it even if others hold the pipes."""
        await self.wait()
        await self.read_output(_OUTPUT_TIMEOUT)
        self.stacks.close()
        self.stdout.close()
        self.stderr.close()
