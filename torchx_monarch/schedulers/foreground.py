# SPDX-License-Identifier: BSD-3-Clause
"""Extend ``torchx run --wait`` and ``--log``: show progress and a summary, return promptly, cancel on a signal.

Ctrl-C, SIGTERM and SIGHUP cancel the app. Without this, the latter two would leave an unattended app on its GPUs.
torchrun passes them to its workers too (``torch.distributed.elastic.agent.server.api.SimpleElasticAgent.run``), and
``LocalScheduler`` ends its apps (``torchx.schedulers.local_scheduler._register_termination_signals``). The command
exits when the app has ended, within its grace period, with 128 plus the signal's number.

TorchX polls once a second. So ``describe`` waits up to 30 s for the app's end before it answers, but only in the main
thread of a ``torchx run``, for an app that it has submitted.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.insight import events
from torchx_monarch.schedulers import command
from torchx_monarch.schedulers.job_status import build
from torchx_monarch.system.termination import closed_terminal_is_null, signal_of, termination
from torchx_monarch.system.untrusted_text import one_line

_MAX_WAIT = 30.0
"""Longest duration of one poll in seconds; the command line then polls again."""

_PROGRESS_INTERVAL = 0.05
"""Seconds between two looks for new progress lines."""

_KILL_TIMEOUT = 15.0

_DETACH = "A job that is submitted without --wait and --log goes on"

_REASONS: dict[int, str] = {
    signal.SIGHUP: f"cancelled: the terminal of `torchx run` was closed. {_DETACH}",
    signal.SIGTERM: f"cancelled: `torchx run` got SIGTERM. {_DETACH}",
}
"""Why a signal that is not Ctrl-C has cancelled an app, and how to submit one that outlives it."""


class Foreground:
    """Watches the app that a ``torchx run`` in this process submits."""

    def __init__(self, apps: Apps[Any], scheduler: str) -> None:
        self._apps = apps
        self._scheduler = scheduler
        self._kills = apps.backend.capabilities.kills
        self._app_id = ""
        self._polls = 0
        self._offset = 0

    @contextlib.contextmanager
    def submission(self) -> Iterator[Callable[[str], None]]:
        """Enclose the submission of an app; yield the function to call with its id.

        If the command will wait for the app, SIGTERM and SIGHUP are handled from now on. They are held back during the
        submission, because an app cannot be cancelled before its id is known.
        """
        if _waits():
            termination.install()

        def submitted(app_id: str) -> None:
            if command.running is not None:
                self._app_id = app_id

        with termination.held():
            yield submitted

    def on_poll(self, app_id: str) -> None:
        """Record a poll of an app. From the second poll on, wait for the app's end and show progress.

        TorchX polls once after each submission to print the state; a second poll means that it waits for the app.
        """
        if not self.has_submitted(app_id) or threading.current_thread() is not threading.main_thread():
            return
        self._polls += 1
        if self._polls < 2:
            return
        # With --log another thread prints the job's log, which contains the same lines.
        shows = sys.stderr is not None and sys.stderr.isatty() and threading.active_count() == 1
        until = time.monotonic() + _MAX_WAIT
        ended = False
        while not ended and time.monotonic() < until:
            ended = self._apps.wait(app_id, _PROGRESS_INTERVAL if shows else until - time.monotonic())
            if shows:
                self._show_progress()

    def has_submitted(self, app_id: str) -> bool:
        return bool(app_id) and app_id == self._app_id

    def on_close(self) -> None:
        """Show how the app that the command has waited for has ended; cancel it first if it exits by a signal.

        A second Ctrl-C kills it. Called when TorchX's command line leaves its runner: nothing is printed after it.

        Raises:
            SystemExit: with 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; TorchX then prints no traceback.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, KeyboardInterrupt):
            termination.remove()
            if self._app_id and _waits():
                self._show_end()
            self._app_id = ""
            return
        number = signal_of(error)
        if self._app_id and _waits():
            self._cancel(number)
        elif self._app_id and not self._apps.wait(self._app_id, 0.0):
            _print_stderr(f"\n{self._handle} keeps running; to end it: torchx cancel {self._handle}")
        raise SystemExit(128 + number) from None

    def _cancel(self, number: int) -> None:
        """Cancel the app unless it has ended, and wait for its end; after Ctrl-C kill it, or wait no longer."""
        is_requested = False
        # The message is inside the block: its reader may press Ctrl-C before the call that prints it has returned.
        try:
            if self._apps.wait(self._app_id, 0.0):
                return
            second = "kills it" if self._kills else "waits no longer for it"
            name, again = ("", "again ") if number == signal.SIGINT else (f" ({signal.Signals(number).name})", "")
            _print_stderr(f"\ncancelling {self._handle}{name}; Ctrl-C {again}{second}")
            self._apps.cancel(self._app_id, reason=_REASONS.get(number, ""))
            is_requested = True
            self._apps.wait(self._app_id, math.inf)
            self._show_end()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, lambda *_: None)  # a key that is held down repeats it; the command ends next
            if self._kills:
                _print_stderr(f"\nkilling {self._handle}")
                self._apps.cancel(self._app_id, 0.0)
                if self._apps.wait(self._app_id, _KILL_TIMEOUT):
                    self._show_end()
            elif not is_requested:
                self._apps.cancel(self._app_id)

    @property
    def _handle(self) -> str:
        return f"{self._scheduler}://torchx/{self._app_id}"

    def _show_end(self) -> None:
        with contextlib.suppress(BackendError, OSError, ValueError):  # ValueError: stderr is closed
            found = self._apps.read(self._app_id)
            if found is not None and found[1].state.is_terminal:
                build(self._handle, *found).summary().write(sys.stderr)

    def _show_progress(self) -> None:
        """Print the events since the last call, if this machine has them."""
        folder = self._apps.backend.folder(self._app_id)
        if folder is None:
            return
        found, self._offset = events.read(folder.events, self._offset, below=folder.trusted)
        for event in found:
            seconds = f" ({event['seconds']:.2f} s)" if event.get("seconds") is not None else ""
            with closed_terminal_is_null():
                print(f"{one_line(event['message'])}{seconds}", file=sys.stderr, flush=True)


def _print_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is closed
        print(text, file=sys.stderr, flush=True)


def _waits() -> bool:
    return command.running is not None and command.running.waits
