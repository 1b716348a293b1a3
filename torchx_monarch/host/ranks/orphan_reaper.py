# SPDX-License-Identifier: BSD-3-Clause
"""Reap and end orphan processes of ranks: the host is their subreaper, so they become its children, not PID 1's."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection

from torchx_monarch.system import processes

_REAP_EVERY = 5.0


async def reap_orphans() -> None:
    """Reap orphan processes that have ended; runs until cancelled.

    A child is reaped only when two checks, 5 s apart, find it dead: Monarch and this package reap the children that
    they have started much earlier than that.
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
    """End the processes that ended ranks have left behind, in whatever session or process group.

    Args:
        job: value of the app's marker variable (``processes.MARKER``).
        ours: processes to keep, with all processes of their sessions.
    """
    # Every rank leads a session. The processes that Monarch has started are in the host's session.
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
