# SPDX-License-Identifier: BSD-3-Clause
"""Runs a command in a terminal of its own, and types and reads as its user does."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waits import WITHIN

_CONTROL = re.compile(r"\x1b\][^\x07]*\x07|\x1b[\[(][0-9;?]*[A-Za-z]|[\x07\x0e\x0f]|\x1b[=>]")


class Terminal:
    """A command in a terminal of its own.

    Attributes:
        pid: process id of the command.
        text: what it has printed, as ``shows`` has read it.

    Args:
        command: its words.
        folder: the folder in which it starts.
        environ: variables beside those of this process.
        size: rows and columns of the terminal; None for none.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environ: Mapping[str, str] | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update(environ or {})
            if size is not None:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            os.execvp(command[0], list(command))
        os.set_blocking(self._descriptor, False)
        self.text = ""

    @property
    def plain(self) -> str:
        """The text without control sequences."""
        return _CONTROL.sub("", self.text)

    @property
    def is_raw(self) -> bool:
        """Whether keys reach the command one by one, Ctrl-C as well."""
        return not termios.tcgetattr(self._descriptor)[3] & (termios.ICANON | termios.ISIG)

    def shows(self, words: str) -> bool:
        """Return whether the terminal has shown words, aside from control sequences."""
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # nothing yet, or the end
                break
            if not data:
                break
            self.text += data.decode(errors="replace")
        return words in self.plain

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._descriptor, keys.encode())

    def forget(self) -> None:
        """Forget what has been shown."""
        self.shows("")
        self.text = ""

    def kill(self) -> None:
        """End the command at once."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._descriptor)

    def wait(self) -> int:
        """Return the exit code of the command, once it has ended."""
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.shows("")
                os.close(self._descriptor)
                return os.waitstatus_to_exitcode(status)
            self.shows("")
            time.sleep(0.02)
        raise TimeoutError(f"the command still runs after {WITHIN:g} s: {self.text}")
