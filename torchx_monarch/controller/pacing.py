# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Limit how often the event loop calls a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Paced:
    """Call a function whenever asked, but at most once in a time: at once, or once for all calls that come too soon.

    Args:
        function: the function; its result is dropped.
        seconds: seconds between two calls.
    """

    def __init__(self, function: Callable[[], object], seconds: float) -> None:
        self._function = function
        self._seconds = seconds
        self._next = 0.0
        self._is_due = False

    def __call__(self) -> None:
        """Call the function now, or as soon as its time has come."""
        loop = asyncio.get_running_loop()
        if self._next <= loop.time():
            self._next = loop.time() + self._seconds
            self._function()
        elif not self._is_due:
            self._is_due = True
            loop.call_at(self._next, self._call_due)

    def _call_due(self) -> None:
        self._is_due = False
        self()
