# SPDX-License-Identifier: BSD-3-Clause
"""A terminal whose user presses Ctrl-C as soon as a command has told what that does."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Iterator


class ImpatientTerminal(io.StringIO):
    """A stderr that sends this process SIGINT before the call that prints a line has returned; each time once more."""

    def flush(self) -> None:
        """Send SIGINT as many times as there are lines."""
        for _ in range(self.getvalue().count("\n")):
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Have SIGINT raise ``KeyboardInterrupt`` during the block, also under pytest-xdist and after TorchX's handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
