# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The whole screen of a terminal, with single keys, and as it was before once the program has ended."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType

_ENTER = "\x1b[?1049h\x1b[?25l"
"""Switch to the alternate screen, and hide the cursor."""

_LEAVE = "\x1b[?25h\x1b[?1049l"

_KEYS = {"[A": "up", "OA": "up", "[B": "down", "OB": "down", "[5~": "pgup", "[6~": "pgdn", "[H": "home", "[F": "end"}
_KEY = re.compile(r"\x1b([\[O][0-9;]*[A-Za-z~])|([^\x1b])", re.DOTALL)

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class TerminalScreen:
    """Use the terminal of standard input and output until the block ends, whatever ends it but SIGKILL."""

    def __enter__(self) -> TerminalScreen:
        self._fd = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._fd)
        self._handlers = {number: signal.signal(number, _exit) for number in _SIGNALS}
        tty.setcbreak(self._fd)
        _write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            _write(_LEAVE)
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    @property
    def size(self) -> tuple[int, int]:
        """The columns and rows of the terminal."""
        return shutil.get_terminal_size()

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines from the top on, in place of what is there. At once, so that nothing flickers."""
        _write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")

    def keys(self, timeout: float) -> list[str]:
        """Return the keys that are pressed, as characters or names of ``_KEYS``.

        Args:
            timeout: seconds to wait for the first; the list is empty after that.
        """
        if not select.select([self._fd], [], [], timeout)[0]:
            return []
        text = os.read(self._fd, 1024).decode(errors="replace")
        if not text:
            return ["q"]  # the terminal has been closed
        return [_KEYS.get(found[1], "") if found[1] else found[2] for found in _KEY.finditer(text)]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
