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
    """Use the terminal of standard input and output until the block ends, whatever ends it but SIGKILL.

    Ctrl-Z gives the terminal back until the process is continued.
    """

    def __enter__(self) -> TerminalScreen:
        self._fd = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._fd)
        self._drawn = ""
        handlers = {**dict.fromkeys(_SIGNALS, _exit), signal.SIGTSTP: self._suspend}
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _take(self) -> None:
        tty.setcbreak(self._fd)
        _write(_ENTER + self._drawn)

    def _give_back(self) -> None:
        try:
            _write(_LEAVE)
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _suspend(self, number: int, _: FrameType | None) -> None:
        self._give_back()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # stops this process here until SIGCONT
        signal.signal(number, self._suspend)
        self._take()

    @property
    def size(self) -> tuple[int, int]:
        """The columns and rows of the terminal."""
        return shutil.get_terminal_size()

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines from the top on, in place of what is there. At once, so that nothing flickers."""
        self._drawn = "\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J"
        _write(self._drawn)

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
    os.write(sys.stdout.fileno(), text.encode(errors="replace"))  # a signal handler may not write to sys.stdout


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
