# SPDX-License-Identifier: BSD-3-Clause
"""Progress of a job for people: one line per phase in the job's log, and the same as an event."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from torchx_monarch.insight import events
from torchx_monarch.model.host_result import KEY_VARIABLE, HostResult, signed
from torchx_monarch.system import error_files
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.system.untrusted_text import lines, one_line

T = TypeVar("T")

SIGN_OF_LIFE_EVERY = 5.0
"""Seconds between two signs of life of replica 0."""

_WAITING_EVERY = 10.0
"""Seconds between two "waiting for" lines."""

_WAITING_FIRST = 5.0
"""Seconds of waiting before the first "waiting for" line."""

_SHORT_RESULT = 4096
"""Largest size in bytes of a container's termination message, and of a signed line of the log."""


class Reporter:
    """Write progress lines to the host's stderr and events to the app's events file, if the backend has one.

    Attributes:
        follower: also called with each line and event, as records of a run (``controller.run_queue``).
        shows_phases: whether the ends of phases are lines, too; else events alone.

    Args:
        termination_log: path of the container's termination message (see ``write_result``); None for none.
    """

    def __init__(
        self, console: Console, events_path: str | None, role: str, termination_log: str | None = None
    ) -> None:
        self._console = console
        self._events_path = events_path
        self._events_writer = WriterThread() if events_path else None
        self._role = role
        self._termination_log = termination_log
        self._attempt = 0
        """The number of the file with the details of the last attempt."""
        self.rank_restarts = 0
        self._last = time.monotonic()
        self.follower: Callable[[dict[str, Any]], None] | None = None
        self.shows_phases = True

    def read_events(self) -> list[events.Event]:
        """Return the events so far; the file may be on a disk that is slow."""
        return events.read_detailed(self._events_path) if self._events_path else []

    async def show_life(self) -> None:
        """Set the time of the events file again and again, for readers that get no answer from this host."""
        while self._events_path and self._events_writer is not None:
            self._events_writer.call(_touch, self._events_path)
            await asyncio.sleep(SIGN_OF_LIFE_EVERY)

    def line(self, text: str) -> None:
        """Write a line to the log, without an event."""
        self._show(one_line(text))

    def block(self, title: str, text: str) -> None:
        """Write a line and a text of several lines. Every line gets the prefix, as a rank may have written the text."""
        self.line(title)
        for line in lines(text):
            self._show(f"  {line}")

    def _show(self, line: str) -> None:
        self.write_line(line)
        if self.follower is not None:
            self.follower({"type": "phase", "text": line})

    def phase(self, kind: str, text: str, **fields: object) -> None:
        """Report the end of a phase, with the seconds since the end of the previous phase."""
        now = time.monotonic()
        seconds, self._last = round(now - self._last, 3), now
        if self.shows_phases:
            self.line(f"{text} ({seconds:.2f} s)")
        self._event(kind, text, seconds, fields)

    def report(self, kind: str, text: str, **fields: object) -> None:
        """Report an event between two phases. The duration of the next phase counts from here."""
        self._last = time.monotonic()
        self.line(text)
        self._event(kind, text, None, fields)

    def record(self, kind: str, text: str, **fields: object) -> None:
        """Report an event for programs, without a line."""
        self._event(kind, text, None, fields)

    def ranks_started(self, text: str, hosts: Iterable[events.HostStart], **fields: object) -> None:
        """Report that the ranks of an attempt have started, the end of a phase, with details of their hosts."""
        self._attempt = time.time_ns()
        self.phase("ranks", text, details=self._attempt, hosts=[*map(vars, hosts)], **fields)

    def ranks_ended(self, text: str, exits: Iterable[events.RankEnd], **fields: object) -> None:
        """Report that the ranks of the last attempt have ended, for programs, with details of their exits."""
        self.record("attempt_end", text, details=self._attempt, exits=[*map(vars, exits)], **fields)

    def restarted(self, text: str, **fields: object) -> None:
        """Report a restart of the ranks and count it where the backend reads the number."""
        self.report("rank_restart", text, **fields)
        self.rank_restarts += 1
        # Now and not at the end: a host that is killed writes no result.
        self.write_termination(HostResult(rank_restarts=self.rank_restarts))

    def begin_result(self) -> None:
        """Write an empty result where the backend reads it; called before the first rank starts.

        Where the termination message of a failed container is empty, Kubernetes puts the end of its log there, to which
        ranks can write.
        """
        self.write_termination(HostResult())

    def write_termination(self, result: HostResult) -> None:
        """Write a container's termination message, of which Kubernetes reads 4096 bytes."""
        text = result.to_text(_SHORT_RESULT)
        if self._events_writer is not None:
            self._events_writer.call(_write, self._termination_log, text)
        else:
            _write(self._termination_log, text)

    async def while_waiting(self, awaitable: Awaitable[T], what: Callable[[], str]) -> T:
        """Await something and write a line every few seconds meanwhile: ``waiting for host 3 of 4, 20 s``."""
        started = time.monotonic()

        async def say() -> None:
            await asyncio.sleep(_WAITING_FIRST)
            while True:
                self.line(f"waiting for {what()}, {time.monotonic() - started:.0f} s")
                await asyncio.sleep(_WAITING_EVERY)

        saying = asyncio.ensure_future(say())
        try:
            return await awaitable
        finally:
            saying.cancel()

    def write_line(self, text: str) -> None:
        """Write a line to the log as it is."""
        self._console.write(self, f"[monarch] {text}\n".encode())

    def _event(self, kind: str, text: str, seconds: float | None, fields: dict[str, object]) -> None:
        text, fields = one_line(text), {"time": time.time(), **fields}
        if self._events_path and self._events_writer is not None:
            append = functools.partial(events.append, self._events_path, kind, text, seconds=seconds)
            self._events_writer.call(functools.partial(append, role=self._role, **fields))
        if self.follower is not None:
            self.follower({"type": "event", "kind": kind, "message": text, "seconds": seconds, "fields": fields})


def write_result(result: HostResult, environ: Mapping[str, str], reporter: Reporter) -> None:
    """Write the result of this host to where its backend reads it.

    Args:
        environ: the environment. MONARCH_RESULT_KEY requests a signed line in the log. After a failure,
            TORCHELASTIC_ERROR_FILE names a file that this function creates, and MONARCH_TERMINATION_LOG an existing
            file, of which Kubernetes reads 4096 bytes.
    """
    if key := environ.get(KEY_VARIABLE):
        reporter.write_line(signed(result.to_text(_SHORT_RESULT), key))
    if result.code == 0:
        return
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        full = f"the file system of {os.path.dirname(path)} is full (no space, no inodes, or a quota)"
        on_full_disk = dataclasses.replace(result, reason=f"{result.reason}; {full}")
        with contextlib.suppress(OSError):
            error_files.write(path, lambda limit: (on_full_disk if limit else result).to_text(limit))
    reporter.write_termination(result)


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def _write(path: str | None, text: str) -> None:
    """Overwrite a file in place: Kubernetes has mounted it, so it cannot be replaced, and another user may own it."""
    if not path:
        return
    with contextlib.suppress(OSError):
        # Where nothing is mounted, a rank may have put a FIFO or a symbolic link in its place.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.ftruncate(fd, 0)
                file.write(text)
