# SPDX-License-Identifier: BSD-3-Clause
"""Receive signals from a pipe, so that an event loop waits for them and for other descriptors together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


def watch_signals(numbers: Iterable[int]) -> int:
    """Have the number of each of these signals written to a pipe as one byte; return its non-blocking read end."""
    wake, signalled = os.pipe()
    for end in (wake, signalled):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return wake
