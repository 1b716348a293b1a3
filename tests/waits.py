# SPDX-License-Identifier: BSD-3-Clause
"""How long tests wait, and waits that say for what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WITHIN = 180.0
"""Seconds that anything may take for which a test waits, unless the test is about a limit.

Under a load of 17 on two cores a process gets a ninth of one: what takes two seconds alone takes twenty. It costs only
the tests that fail.
"""


def until(condition: Callable[..., object], what: str, seconds: float = WITHIN, every: float = 0.02) -> object:
    """Poll a condition until it holds; return its value.

    Args:
        condition: is polled.
        what: what is waited for, for the message of a failure.
        seconds: how long.
        every: seconds between two polls.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still waiting for {what} after {seconds:g} s"
        time.sleep(every)
    return value


async def until_async(condition: Callable[[], object], what: str) -> None:
    """Poll a condition until it holds, and let the other tasks run meanwhile."""
    deadline = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {WITHIN:g} s"
        await asyncio.sleep(0.01)
