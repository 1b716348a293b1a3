# SPDX-License-Identifier: BSD-3-Clause
"""In a rank: wait in a breakpoint for a debugger, and be debugged on the terminal that the host opens for it.

``rank_main`` runs this file at the first breakpoint of a rank. The terminal is stdin and stdout of the rank while
pdb reads a command, so that line editing, history and completion are those of Python; otherwise these are as before.
"""

from __future__ import annotations

import _thread
import contextlib
import io
import json
import os
import pdb
import select
import signal
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any

_session: _Debugger | None = None

_connecting = _thread.allocate_lock()
"""Held by the thread that waits for a debugger: a rank has one terminal, and another thread that stops goes on."""

_expired = False
"""Whether no debugger has come in time: the rank does not wait again."""


def stop_at(
    frame: FrameType, host: str, rank: int, own_files: Collection[str], header: str | None, more: Mapping[str, Any]
) -> None:
    """Stop in pdb at a frame of the program, once a debugger is attached; do nothing if none is.

    Args:
        host: socket file of the host; empty for pdb on the stdin and stdout of this process.
        own_files: the files whose frames are below the program's on the stack.
        header: text that is shown first; None for none.
        more: further arguments of ``pdb.set_trace``.
    """
    debugger: pdb.Pdb | None = _attached(frame, host, rank, own_files) if host else pdb.Pdb()
    if debugger is None:
        return
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame, **more)


def _attached(frame: FrameType, host: str, rank: int, own_files: Collection[str]) -> _Debugger | None:
    """Return the debugger that is attached, or becomes so; None if none does, of which the host writes a line."""
    global _session
    if _session is not None and _session.is_attached():
        return _session
    if _expired or not _connecting.acquire(blocking=False):
        return None
    try:
        _session = _wait(frame, host, rank, own_files)
    finally:
        _connecting.release()
    return _session


def _wait(frame: FrameType, host: str, rank: int, own_files: Collection[str]) -> _Debugger | None:
    global _expired
    code = frame.f_code
    place = {
        "rank": rank,
        "file": code.co_filename,
        "line": frame.f_lineno,
        "function": code.co_name,
    }
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(host)
        link.sendall(json.dumps(place).encode() + b"\n")
        with link.makefile("rb") as file:
            answer = json.loads(file.readline() or "null")  # until the host answers, or closes the connection
        if not answer:
            _expired = answer is not None
            link.close()
            return None
        terminal = _Terminal(answer["terminal"], answer["kind"])
        link.sendall(b"+")
    except OSError as error:
        link.close()
        print(f"[monarch] no debugger can be attached: {error}", file=sys.stderr)
        return None
    except BaseException:
        link.close()
        raise
    with terminal.in_use():  # Pdb imports readline, which asks what kind of terminal stdout is
        return _Debugger(terminal, link, own_files)


class _Terminal:
    """The terminal that the host has opened: its device, and the kind of the user's terminal, TERM.

    Attributes:
        output: text file that writes to it, and drops what cannot be written.
    """

    def __init__(self, path: str, kind: str) -> None:
        # It does not become the controlling terminal, whose end would end this process.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
        self._kind = kind
        self.output = _writer(self._descriptor)

    @property
    def is_hung_up(self) -> bool:
        """Whether the other end has been closed."""
        poll = select.poll()
        poll.register(self._descriptor, 0)
        return bool(poll.poll(0))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Make it stdin and stdout of this process."""
        streams, kind = (sys.stdin, sys.stdout, sys.stderr), os.environ.get("TERM")
        for stream in streams[1:]:
            with contextlib.suppress(Exception):  # of a stream of the program's
                stream.flush()
        copies = [_duplicate(number) for number in (0, 1)]
        os.environ["TERM"] = self._kind
        try:
            for number in (0, 1):
                os.dup2(self._descriptor, number)
            sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
            sys.stdout = sys.stderr = _writer(1)
            yield
        finally:
            sys.stdout.flush()
            sys.stdin, sys.stdout, sys.stderr = streams
            for number, copy in enumerate(copies):
                if copy is None:
                    os.close(number)
                else:
                    os.dup2(copy, number)
                    os.close(copy)
            del os.environ["TERM"]
            if kind is not None:
                os.environ["TERM"] = kind

    def close(self) -> None:
        """Close it."""
        self.output.close()
        os.close(self._descriptor)


class _Debugger(pdb.Pdb):
    """pdb on a terminal that may go away. At the end of ``link``, the connection to it, the host closes the terminal.

    Attributes:
        ended: whether the program goes on without it.
    """

    def __init__(self, terminal: _Terminal, link: socket.socket, own_files: Collection[str]) -> None:
        super().__init__(stdout=terminal.output)
        self.use_rawinput = 1  # type: ignore[assignment]
        self.ended = False
        self._terminal = terminal
        self._link = link
        self._own_files = own_files

    def is_attached(self) -> bool:
        """Return whether the user still has the terminal; close it otherwise."""
        if not self.ended and self._terminal.is_hung_up:
            self.do_detach("")
            self._close()
        return not self.ended

    def cmdloop(self, intro: Any = None) -> None:
        """Read and execute commands, unless the terminal has gone away: then go on without."""
        if not self.is_attached():
            return
        self.stdout.flush()
        with self._terminal.in_use():
            self.stdin = sys.stdin
            super().cmdloop(intro)
        if self.ended:
            self._close()

    def precmd(self, line: str) -> str:
        """Execute no half of a command that was being typed when the terminal went away."""
        return "detach" if self._terminal.is_hung_up else super().precmd(line)

    def do_detach(self, arg: str) -> bool:
        """detach

        Remove all breakpoints, and go on without the debugger. It can be attached again in the next breakpoint().
        """
        self.clear_all_breaks()
        self.set_continue()
        self.ended = True
        with contextlib.suppress(OSError):
            self._link.sendall(b"d")
        return True

    def _close(self) -> None:
        self._terminal.close()
        self._link.close()

    def sigint_handler(self, signum: signal.Signals, frame: FrameType) -> None:
        """Stop the program on SIGINT, unless the debugger has gone away."""
        if self.is_attached():
            super().sigint_handler(signum, frame)
            return
        before = getattr(pdb.Pdb, "_previous_sigint_handler", None) or signal.default_int_handler
        signal.signal(signal.SIGINT, before)
        if callable(before):
            before(signum, frame)

    def stop_here(self, frame: FrameType) -> bool:
        """Stop in no frame below the program's."""
        return frame.f_code.co_filename not in self._own_files and bool(super().stop_here(frame))

    def get_stack(self, f: FrameType | None, t: Any) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the program's frames alone."""
        stack, index = super().get_stack(f, t)
        own = 0
        while own < index and stack[own][0].f_code.co_filename in self._own_files:
            own += 1
        return stack[own:], index - own


class _Raw(io.FileIO):
    """A file descriptor, left open, to which a failed write is none."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _writer(descriptor: int) -> io.TextIOWrapper:
    raw = _Raw(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def _duplicate(descriptor: int) -> int | None:
    try:
        return os.dup(descriptor)
    except OSError:
        return None  # the program has closed it
