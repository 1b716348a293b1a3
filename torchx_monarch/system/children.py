# SPDX-License-Identifier: BSD-3-Clause
"""Own the children of this process: one table of their owners, and one handler of SIGCHLD.

The object that starts a process, or has another one fork it, owns it by a ``Child``. A child without an owner is an
orphan: as the subreaper of its descendants, this process gets those whose parents have ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from typing import Any

from torchx_monarch.system import processes

_MEMBERS_PATIENCE = 0.1
"""Seconds for members of an ended child's process group, which get its signals, to end by themselves."""


class Child:
    """A child of this process. While it runs, no other process can get its pid.

    Attributes:
        pid: 0 before ``begin``.
        given: descriptors for a process that another one forks, which are closed here when it begins.
        returncode: negative for a signal; None before the end.
        ended_at: seconds since the epoch; 0 before.
    """

    def __init__(self, pid: int = 0) -> None:
        self.pid = 0
        self.given: tuple[int, ...] = ()
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self.ended_at = 0.0
        if pid:
            self.begin(pid)

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    def begin(self, pid: int) -> None:
        """Own a child, which runs now or has ended just now, and has had no owner. Call this in the event loop."""
        self.pid = pid
        owners[pid] = self
        self.close_given()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, processes.reap, _has_ended)
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                loop.call_soon(processes.reap, _has_ended)
        except ChildProcessError:  # it was killed, and reaped as an orphan, before this process knew it
            _has_ended(pid, -signal.SIGKILL)

    def close_given(self) -> None:
        given, self.given = self.given, ()
        for descriptor in given:
            os.close(descriptor)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.is_running:
            os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """Take the exit code of the process, which has been reaped."""
        self.returncode, self.ended_at = code, time.time()
        self._ended.set()


owners: dict[int, Child] = {}
"""The children that have an owner, by pid."""


def start(words: Sequence[str], **options: Any) -> tuple[Child, subprocess.Popen[bytes]]:
    """Start a child; options are those of ``subprocess.Popen``, whose object is for the pipes alone."""
    process = subprocess.Popen(words, bufsize=0, **options)
    process.returncode = 0  # without this, it would wait for the child, too
    return Child(process.pid), process


def _has_ended(pid: int, code: int) -> None:
    if child := owners.pop(pid, None):
        child.end(code)


async def end_orphans(job: str, groups: Collection[int]) -> list[int]:
    """End the orphans, and their descendants, of an app; return those that even SIGKILL does not end.

    ``groups`` are the process groups that ended children have led.
    """

    def orphans() -> list[int]:
        return processes.descendants(os.getpid(), job, without=owners)

    def members() -> list[int]:
        return [pid for pid in orphans() if (found := processes.process(pid)) and found.group in groups]

    for find, patience in ((members, _MEMBERS_PATIENCE), (orphans, processes.DAEMONS_PATIENCE)):
        for pause in processes.end(find, patience):
            await asyncio.sleep(pause)
    return orphans()
