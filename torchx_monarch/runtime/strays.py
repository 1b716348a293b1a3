# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Nothing outlives the host process: orphans of its ranks become its own, are reaped, and are killed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36

_REAP_EVERY = 5.0


def adopt_orphans() -> None:
    """Have what a rank leaves behind reparented to this process, as if it were PID 1 of a container."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def reap_orphans() -> None:
    """Reap adopted processes that have ended, for as long as this process runs.

    Only those found dead twice: a child of Monarch's or ours is reaped by who started it long before.
    """
    seen: set[int] = set()
    while True:
        await asyncio.sleep(_REAP_EVERY)
        dead = {pid for pid, state in _children().get(os.getpid(), []) if state == "Z"}
        for pid in dead & seen:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        seen = dead - seen


def kill_descendants() -> None:
    """Send SIGKILL to every process below this one, until none is left."""
    for _ in range(100):
        children, found, below = _children(), False, [os.getpid()]
        while below:
            for pid, state in children.get(below.pop(), []):
                below.append(pid)
                if state != "Z":
                    found = True
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _children() -> dict[int, list[tuple[int, str]]]:
    """Process id to its children, each with the state letter, of all processes that /proc shows."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may hold anything, spaces and parentheses included.
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append((int(entry.name), fields[0].decode()))
    return children
