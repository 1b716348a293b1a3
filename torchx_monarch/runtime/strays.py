# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The duty of PID 1, which a host process has in a container and takes on elsewhere: reaping orphans."""

from __future__ import annotations

import asyncio
import contextlib
import os

from torchx_monarch import processes

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
