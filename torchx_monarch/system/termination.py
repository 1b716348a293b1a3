# SPDX-License-Identifier: BSD-3-Clause
"""Handle SIGTERM and SIGHUP in a command that waits for a job or a run: it cancels that before it exits.

A command exits with 128 plus the number of the signal, as a shell reports a program that a signal has ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
import threading
from collections.abc import Iterator
from types import FrameType

_CANCEL_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Signalled(KeyboardInterrupt):
    """Raised when this process receives SIGTERM or SIGHUP; a ``KeyboardInterrupt`` passes ``except Exception``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def signal_of(error: KeyboardInterrupt) -> int:
    """Return the number of the signal that has raised an exception: SIGTERM, SIGHUP or SIGINT."""
    return error.number if isinstance(error, Signalled) else signal.SIGINT


@contextlib.contextmanager
def closed_terminal_is_null() -> Iterator[None]:
    """Drop what the block, and every later one, writes to a terminal that is closed, which is an error EIO.

    The command must live on to cancel what it waits for: SIGHUP may come after the error, or not at all.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        if not (closed := [fd for fd in (1, 2) if _is_closed_terminal(fd)]):
            raise  # a disk fails
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for fd in closed:
            os.dup2(null, fd)
        os.close(null)


def _is_closed_terminal(fd: int) -> bool:
    try:
        termios.tcgetattr(fd)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)  # ENOTTY: a file or a pipe
    return False


class Termination:
    """The handler of SIGTERM and SIGHUP of this process."""

    def __init__(self) -> None:
        self._is_held = False
        self._pending = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise ``Signalled``, or record the signal while signals are held back."""
        for signum in _CANCEL_SIGNALS:  # a closed terminal sends SIGHUP twice, and systemd SIGTERM and SIGHUP
            if signal.getsignal(signum) is self:
                # Not SIG_IGN: Python reports an error for a pending signal that is ignored meanwhile.
                signal.signal(signum, lambda *_: None)
        if not self._is_held:
            raise Signalled(number)
        self._pending = number

    def install(self) -> None:
        """Install the handler for signals that have their default action; under nohup, SIGHUP stays ignored."""
        if threading.current_thread() is threading.main_thread():
            for number in _CANCEL_SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self)

    def remove(self) -> None:
        """Restore the default action of the signals that this handler serves."""
        if threading.current_thread() is threading.main_thread():
            for number in _CANCEL_SIGNALS:
                if signal.getsignal(number) is self:
                    signal.signal(number, signal.SIG_DFL)

    def hold(self) -> None:
        """Hold signals back until ``release``."""
        self._is_held = True

    def release(self) -> None:
        """Hold signals back no longer, and raise the first one that arrived meanwhile."""
        self._is_held = False
        number, self._pending = self._pending, 0
        if number:
            raise Signalled(number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back during the block; raise the first one at its end, unless the block raises."""
        self.hold()
        try:
            yield
        except BaseException:
            self._is_held, self._pending = False, 0
            raise
        self.release()


termination = Termination()
"""The handler of this process."""
