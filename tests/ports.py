# SPDX-License-Identifier: BSD-3-Clause
"""TCP ports for tests that must know a port before a process listens on it."""

from __future__ import annotations

import random
import socket

_LOW, _HIGH = 10000, 20000
"""Below the ports that the kernel gives to connections (32768 and more), which would take one of them meanwhile."""


def free_port() -> int:
    """Return a port on which no process listens."""
    while True:
        port = random.SystemRandom().randrange(_LOW, _HIGH)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
