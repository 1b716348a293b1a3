# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``torchx run --wait`` or ``--log`` adds: progress, a prompt end, and that a signal to it ends the job.

Ctrl-C cancels the app. So do SIGTERM and SIGHUP, which would otherwise leave an app that nobody watches on its GPUs:
torchrun passes them on to its workers (``torch.distributed.elastic.agent.server.api.SimpleElasticAgent.run``), and
``LocalScheduler`` ends its apps (``torchx.schedulers.local_scheduler._register_termination_signals``). The command ends
when the app has, which has its grace, with 128 and the number of the signal.

TorchX's command line polls once a second and knows nothing of the job between two polls. Apps submitted elsewhere, or
from Python, are not touched: only in the process of a ``torchx run``, only for what it submitted, and only in its main
thread, does ``describe`` wait a while for the end before it answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torchx.specs import TORCHX_CONTEXT_NAME, is_terminal

from torchx_monarch.insight import events
from torchx_monarch.system.untrusted_text import one_line

_LONGEST_WAIT = 30.0
"""Seconds that one poll may last; the command line then polls again."""

_SLICE = 0.05
"""Seconds between two looks at the events."""

_KILL_TIMEOUT = 15.0

_ASK_EVERY = 1.0
"""Seconds between two questions to a backend that is no ``Waitable``, as TorchX has it."""

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


class _Signalled(KeyboardInterrupt):
    """A signal has asked this process to end. As Ctrl-C, no ``except Exception`` stops it.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Termination:
    """The handler of SIGTERM and SIGHUP of this process."""

    def __init__(self) -> None:
        self._is_held = False
        self._pending = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise ``_Signalled``, now or when signals are no longer held back."""
        for each in _PASSED_ON:  # a closed terminal sends SIGHUP twice, and systemd SIGTERM and SIGHUP
            if signal.getsignal(each) is self:
                # Not SIG_IGN: Python complains of a signal that has arrived already and is ignored now.
                signal.signal(each, lambda *_: None)
        if not self._is_held:
            raise _Signalled(number)
        self._pending = number

    def install(self) -> None:
        """Handle the signals that have no other handler and are not ignored (nohup)."""
        if threading.current_thread() is threading.main_thread():
            for number in _PASSED_ON:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self)

    def remove(self) -> None:
        """Leave the signals to their default action again."""
        if threading.current_thread() is threading.main_thread():
            for number in _PASSED_ON:
                if signal.getsignal(number) is self:
                    signal.signal(number, signal.SIG_DFL)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back; the first of them is raised at the end, unless an exception is.

        Raises:
            _Signalled: a signal has arrived meanwhile.
        """
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            number, self._pending = self._pending, 0
        if number:
            raise _Signalled(number)


_termination = _Termination()


class Waitable(Protocol):
    """What a wrapped scheduler may offer beyond TorchX's interface."""

    def wait_terminal(self, app_id: str, timeout: float) -> bool:
        """Wait until the app has ended; whether it has."""

    def events_path(self, app_id: str) -> Path:
        """The app's events file."""

    def stop(self, app_id: str, grace: float | None) -> None:
        """Ask for the end; SIGKILL after ``grace`` seconds, None for the grace that was asked for at submission."""


class _Polled:
    """The part of that which can be had from any scheduler: whether an app has ended, and cancel.

    Args:
        inner: the scheduler.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def wait_terminal(self, app_id: str, timeout: float) -> bool:
        """Wait until the app has ended, or is not known; whether it has."""
        until = time.monotonic() + timeout
        while (app := self._inner.describe(app_id)) is not None and not is_terminal(app.state):
            if time.monotonic() >= until:
                return False
            time.sleep(_ASK_EVERY)
        return True

    def stop(self, app_id: str, grace: float | None) -> None:
        """Cancel. There is nothing harder than that."""
        if grace is None:
            self._inner._cancel_existing(app_id)


class Foreground:
    """Watches what a ``torchx run`` in this process has submitted.

    Args:
        inner: the wrapped scheduler.
        backend: the name under which users address it.
    """

    def __init__(self, inner: Any, backend: str) -> None:
        self._waitable: Waitable | None = inner if hasattr(inner, "wait_terminal") else None
        self._inner: Waitable | _Polled = self._waitable or _Polled(inner)
        self._backend = backend
        self._polls: dict[str, int] = {}
        self._offsets: dict[str, int] = {}

    @contextlib.contextmanager
    def submission(self) -> Iterator[Callable[[str], None]]:
        """Surround the submission of an app; gives the function to call with its id.

        Where the command is to wait for the app, SIGTERM and SIGHUP are handled from here on. During the submission
        they are held back: an app whose id is not known yet could not be cancelled.
        """
        in_command = os.environ.get(TORCHX_CONTEXT_NAME) == "cli_run"
        if in_command and _is_to_wait(sys.argv):
            _termination.install()

        def submitted(app_id: str) -> None:
            if in_command:
                self._polls[app_id] = 0

        with _termination.held():
            yield submitted

    def polled(self, app_id: str) -> None:
        """Note a poll. From the second on the command line is waiting: wait with it for the end, and show progress.

        The first poll prints the state after submission, whether or not the user waits.
        """
        if app_id not in self._polls or threading.current_thread() is not threading.main_thread():
            return
        self._polls[app_id] += 1
        if self._polls[app_id] < 2:
            return
        _termination.install()
        if self._waitable is None:
            return
        # With --log another thread prints the job's log, where the same lines stand.
        shows = sys.stderr is not None and sys.stderr.isatty() and threading.active_count() == 1
        until = time.monotonic() + _LONGEST_WAIT
        ended = False
        while not ended and time.monotonic() < until:
            ended = self._waitable.wait_terminal(app_id, _SLICE)
            if shows:
                self._show(app_id, self._waitable)

    def has_submitted(self, app_id: str) -> bool:
        """Whether an app is one that a ``torchx run`` in this process has submitted."""
        return app_id in self._polls

    def closing(self) -> None:
        """Called when the command line leaves its runner. After Ctrl-C: cancel what it waits for, twice: kill.

        Raises:
            SystemExit: after Ctrl-C with 130, after SIGTERM with 143, after SIGHUP with 129; without a traceback.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, KeyboardInterrupt):
            _termination.remove()
            return
        number = error.number if isinstance(error, _Signalled) else signal.SIGINT
        for app_id, polls in self._polls.items():
            if self._inner.wait_terminal(app_id, 0.0):
                continue
            handle = f"{self._backend}://torchx/{app_id}"
            # Before the second poll the options of the command line alone tell.
            if polls < 2 and not _is_to_wait(sys.argv):
                _say(f"\n{handle} goes on; to end it: torchx cancel {handle}")
                continue
            second = "waits no longer for it" if self._waitable is None else "kills it"
            why = "" if number == signal.SIGINT else f" ({signal.Signals(number).name})"
            _say(f"\ncancelling {handle}{why}; Ctrl-C {'again ' if not why else ''}{second}")
            try:
                self._inner.stop(app_id, None)
                while not self._inner.wait_terminal(app_id, 3600.0):
                    continue
            except KeyboardInterrupt:
                if self._waitable is None:
                    continue
                _say(f"\nkilling {handle}")
                self._inner.stop(app_id, 0.0)
                self._inner.wait_terminal(app_id, _KILL_TIMEOUT)
        raise SystemExit(128 + number) from None

    def _show(self, app_id: str, waitable: Waitable) -> None:
        found, offset = events.read(waitable.events_path(app_id), self._offsets.get(app_id, 0))
        self._offsets[app_id] = offset
        for event in found:
            seconds = f" ({event['seconds']:.2f} s)" if event.get("seconds") is not None else ""
            print(f"{one_line(event['message'])}{seconds}", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is closed
        print(text, file=sys.stderr, flush=True)


_WITH_VALUE = ("-s", "--scheduler", "-cfg", "--scheduler_args", "--workspace", "--buck-target", "--parent_run_id")


def _is_to_wait(argv: Sequence[str]) -> bool:
    """Whether this is a ``torchx run`` that is to wait for the end, by its options, which precede the component."""
    words = iter(argv[1:])
    if next(words, "") != "run":
        return False
    for word in words:
        if word in ("--wait", "--log", "--tee_logs"):
            return True
        if word in _WITH_VALUE:
            next(words, "")
        elif not word.startswith("-"):
            return False
    return False
