# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What leaves the family of a rank becomes the host's child, as it would be PID 1's: reaping and ending them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection

from torchx_monarch.system import processes

_REAP_EVERY = 5.0


async def reap_orphans() -> None:
    """Reap adopted processes that have ended, for as long as this process runs.

    Only those found dead twice: a child of Monarch's or ours is reaped by who started it long before.
    """
    seen: set[int] = set()
    while True:
        await asyncio.sleep(_REAP_EVERY)
        dead = processes.dead_children()
        for pid in dead & seen:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        seen = dead - seen


def end_orphans(job: str, ours: Collection[int]) -> None:
    """SIGKILL what ranks that have ended left behind in sessions or process groups of its own.

    Args:
        job: the app's marker (``processes.MARKER``).
        ours: processes that are to live on, with all that is in their sessions.
    """
    # Every rank leads a session. What Monarch has started is in ours.
    keep = {os.getsid(0), *map(_session, ours)}

    def find() -> list[int]:
        return [pid for pid in processes.descendants(os.getpid(), job) if _session(pid) not in keep]

    processes.kill_until_gone(find)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return os.getsid(0)
