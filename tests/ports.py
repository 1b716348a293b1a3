# SPDX-License-Identifier: BSD-3-Clause
"""TCP ports for tests that must know a port before a process listens on it."""

from __future__ import annotations

import itertools
import os
import random
import socket

_LOW, _HIGH = 10000, 32000
"""Below the ports that the kernel gives to connections (32768 and more), which would take one of them meanwhile."""

_STEP = 10


def _candidates() -> range:
    """Return the ports of this process: no two workers of pytest-xdist have one in common."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return range(_LOW + _STEP * int(worker[2:]), _HIGH, _STEP * int(workers))


_next = itertools.cycle(random.SystemRandom().sample(_candidates(), len(_candidates())))


def free_port() -> int:
    """Return a port on which no process listens, and which no other test gets, as little as the nine after it."""
    while True:
        port = next(_next)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
