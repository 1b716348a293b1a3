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


def until(
    condition: Callable[..., object], what: str | Callable[[], str], seconds: float = WITHIN, every: float = 0.02
) -> object:
    """Poll a condition until it holds; return its value.

    Args:
        condition: is polled.
        what: what is waited for, for the message of a failure; a function if the message is to show what it is then.
        seconds: how long.
        every: seconds between two polls, at least. A condition that takes long, such as a command, is polled a fifth of
            the time: the processors are the tests' limit.
    """
    began = polled = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        waited, took = now - began, now - polled
        assert waited < seconds, f"still waiting for {what if isinstance(what, str) else what()} after {seconds:g} s"
        time.sleep(max(every, min(4 * took, 1.0), min(waited / 10, 5 * every)))
        polled = time.monotonic()
    return value


async def until_async(condition: Callable[[], object], what: str) -> None:
    """Poll a condition until it holds, and let the other tasks run meanwhile."""
    deadline = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {WITHIN:g} s"
        await asyncio.sleep(0.01)
