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
from torchx_monarch.schedulers.description import summary_of
from torchx_monarch.system.termination import closed_terminal_is_null, signal_of, termination
from torchx_monarch.system.untrusted_text import one_line

_MAX_WAIT = 30.0
"""Longest duration of one poll in seconds; the command line then polls again."""

_KILL_TIMEOUT = 15.0

_DETACH = "A job that is submitted without --wait and --log goes on"

_REASONS: dict[int, str] = {
    signal.SIGHUP: f"cancelled: the terminal of `torchx run` was closed. {_DETACH}",
    signal.SIGTERM: f"cancelled: `torchx run` got SIGTERM. {_DETACH}",
}
"""Why a signal that is not Ctrl-C has cancelled an app, and how to submit one that outlives it."""


class Foreground:
    """Watches the apps that a ``torchx run`` in this process has submitted."""

    def __init__(self, apps: Apps[Any], scheduler: str, kills: bool) -> None:
        self._apps = apps
        self._scheduler = scheduler
        self._kills = kills
        self._polls: dict[str, int] = {}
        self._submitted: dict[str, float] = {}
        """When each app was submitted, in seconds since the epoch."""
        self._offsets: dict[str, int] = {}

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
                self._polls[app_id] = 0
                self._submitted[app_id] = time.time()

        with termination.held():
            yield submitted

    def on_poll(self, app_id: str) -> None:
        """Record a poll of an app. From the second poll on, wait for the app's end and show progress.

        TorchX polls once after each submission to print the state; a second poll means that it waits for the app.
        """
        if app_id not in self._polls or threading.current_thread() is not threading.main_thread():
            return
        self._polls[app_id] += 1
        if self._polls[app_id] < 2:
            return
        # With --log another thread prints the job's log, which contains the same lines.
        shows = sys.stderr is not None and sys.stderr.isatty() and threading.active_count() == 1
        until = time.monotonic() + _MAX_WAIT
        ended = False
        while not ended and time.monotonic() < until:
            ended = self._apps.wait(app_id, 0.05)
            if shows:
                self._show(app_id)

    def has_submitted(self, app_id: str) -> bool:
        """Whether a ``torchx run`` in this process has submitted the app."""
        return app_id in self._polls

    def on_close(self) -> None:
        """Show how the apps that the command has waited for have ended; cancel them first if it exits by a signal.

        A second Ctrl-C kills them. Called when TorchX's command line leaves its runner: nothing is printed after it.

        Raises:
            SystemExit: with 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; TorchX then prints no traceback.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, KeyboardInterrupt):
            termination.remove()
            for app_id in self._polls if _waits() else ():
                self._show_end(app_id)
            self._polls.clear()
            return
        number = signal_of(error)
        for app_id in self._polls:
            if _waits():
                self._cancel(app_id, number)
            elif not self._apps.wait(app_id, 0.0):
                handle = self._handle(app_id)
                _print_stderr(f"\n{handle} keeps running; to end it: torchx cancel {handle}")
        raise SystemExit(128 + number) from None

    def _cancel(self, app_id: str, number: int) -> None:
        """Cancel an app that has not ended, and wait for its end; after Ctrl-C kill it, or wait no longer."""
        is_requested = False
        # The message is inside the block: its reader may press Ctrl-C before the call that prints it has returned.
        try:
            if self._apps.wait(app_id, 0.0):
                return
            second = "kills it" if self._kills else "waits no longer for it"
            name, again = ("", "again ") if number == signal.SIGINT else (f" ({signal.Signals(number).name})", "")
            _print_stderr(f"\ncancelling {self._handle(app_id)}{name}; Ctrl-C {again}{second}")
            self._apps.cancel(app_id, reason=_REASONS.get(number, ""))
            is_requested = True
            while not self._apps.wait(app_id, 3600.0):
                continue
            self._show_end(app_id)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, lambda *_: None)  # a key that is held down repeats it; the command ends next
            if self._kills:
                _print_stderr(f"\nkilling {self._handle(app_id)}")
                self._apps.cancel(app_id, 0.0)
                if self._apps.wait(app_id, _KILL_TIMEOUT):
                    self._show_end(app_id)
            elif not is_requested:
                self._apps.cancel(app_id)

    def _handle(self, app_id: str) -> str:
        return f"{self._scheduler}://torchx/{app_id}"

    def _show_end(self, app_id: str) -> None:
        with contextlib.suppress(BackendError, OSError, ValueError):  # ValueError: stderr is closed
            found = self._apps.read(app_id)
            if found is not None and found[1].state.is_terminal:
                summary_of(self._handle(app_id), *found, self._submitted[app_id], time.time()).write(sys.stderr)

    def _show(self, app_id: str) -> None:
        if (folder := self._apps.backend.folder(app_id)) is None:
            return
        found, self._offsets[app_id] = events.read(folder.events, self._offsets.get(app_id, 0), below=folder.trusted)
        for event in found:
            seconds = f" ({event['seconds']:.2f} s)" if event.get("seconds") is not None else ""
            with closed_terminal_is_null():
                print(f"{one_line(event['message'])}{seconds}", file=sys.stderr, flush=True)


def _print_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is closed
        print(text, file=sys.stderr, flush=True)


def _waits() -> bool:
    return command.running is not None and command.running.waits
