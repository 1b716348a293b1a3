# SPDX-License-Identifier: BSD-3-Clause
"""In a rank: wait in a breakpoint for a debugger, and be debugged on a terminal whose other end is a client's.

``rank_main`` runs this file at the first breakpoint of a rank. The terminal is stdin and stdout of the rank while
pdb reads a command, so that line editing, history and completion are those of Python; otherwise these are as before.
The rank connects to its host, which passes its messages on (``controller.rank_clients`` lists them).
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import io
import json
import os
import pdb
import select
import signal
import socket
import struct
import sys
import termios
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any

_PIECE = 4096
"""Bytes of a terminal's output in one message."""

_CLOSE_TIMEOUT = 5.0
"""Seconds for a closed terminal's output to be sent."""

_session: _Debugger | None = None

_connecting = _thread.allocate_lock()
"""Held by the thread that waits for a debugger: a rank has one terminal, and another thread that stops goes on."""

_expired = False
"""Whether no debugger has come in time: the rank does not wait again."""


def stop_at(
    frame: FrameType, host: str, rank: int, own_files: Collection[str], header: str | None, more: Mapping[str, Any]
) -> None:
    """Stop in pdb at a frame of the program, once a debugger is attached; do nothing if none is.

    Without a socket file of the host it is pdb on the stdin and stdout of this process. ``more`` are further arguments
    of ``pdb.set_trace``.
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
    place = {"rank": rank, "file": code.co_filename, "line": frame.f_lineno, "function": code.co_name}
    with contextlib.ExitStack() as unattached:
        link = unattached.enter_context(socket.socket(socket.AF_UNIX))
        try:
            link.connect(host)
            _send(link, type="breakpoint", **place)
            with link.makefile("rb", 0) as file:  # without a buffer: what follows the line is for the terminal
                answer = json.loads(file.readline() or "{}")  # until replica 0 answers, or the connection ends
            if answer.get("type") != "attach":
                _expired = answer.get("type") == "expired"
                return None
            terminal = _Terminal(link, answer)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                _send(link, type="end", reason=f"goes on: no terminal can be opened: {error}")
            print(f"[monarch] no debugger can be attached: {error}", file=sys.stderr)
            return None
        unattached.pop_all()
    with terminal.in_use():  # Pdb imports readline, which asks what kind of terminal stdout is
        return _Debugger(terminal, own_files)


class _Terminal:
    """A terminal whose other end is that of a connection to a client. It is not the controlling terminal, whose end
    would end this process: the signals of its keys are sent here. It is hung up once its other end is closed.
    """

    def __init__(self, link: socket.socket, client: Mapping[str, Any]) -> None:
        self._link = link
        self._far_end, self._descriptor = os.openpty()
        self._kind = str(client.get("kind"))
        self.output = _writer(self._descriptor)
        self.is_hung_up = False
        self._relaying = _thread.allocate_lock()
        self._relaying.acquire()
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # no numbers
            size = [min(max(int(client.get(name, 24)), 1), 0xFFFF) for name in ("rows", "columns")]
            fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        os.set_blocking(self._far_end, False)
        os.register_at_fork(after_in_child=self._hang_up)
        _thread.start_new_thread(self._relay, ())

    def _relay(self) -> None:
        received = keys = b""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        with contextlib.suppress(Exception):  # this thread must hang up: pdb waits for that
            while True:
                poll.register(self._far_end, select.POLLIN | (select.POLLOUT if keys else 0))
                ready = dict(poll.poll())
                if self._link.fileno() in ready:
                    if not (data := self._link.recv(_PIECE)):
                        break
                    *lines, received = (received + data).split(b"\n")
                    keys += b"".join(
                        str(json.loads(line).get("data", "")).encode("latin-1", "replace") for line in lines
                    )
                if ready.get(self._far_end, 0) & select.POLLOUT:
                    keys = keys[self._type(keys) :]
                if ready.get(self._far_end, 0) & select.POLLIN:
                    self._show()
        with contextlib.suppress(OSError):  # nothing is left, or the connection is broken
            while True:
                self._show()
        with contextlib.suppress(OSError):
            _send(self._link, type="end", reason="goes on: its debugger was detached")
        self._hang_up()

    def _type(self, keys: bytes) -> int:
        """Type keys, or send the signal of the first interrupt key; return how many keys that were."""
        attributes: Any = termios.tcgetattr(self._far_end)
        if attributes[3] & termios.ISIG and (interrupt := attributes[6][termios.VINTR]) in keys:
            # The kernel would drop what has been typed and printed some time after the key: what pdb prints then, too.
            termios.tcflush(self._descriptor, termios.TCIFLUSH)
            os.kill(os.getpid(), signal.SIGINT)
            return keys.index(interrupt) + 1
        return os.write(self._far_end, keys)

    def _show(self) -> None:
        _send(self._link, type="output", data=os.read(self._far_end, _PIECE).decode("latin-1"))

    def _hang_up(self) -> None:
        if not self.is_hung_up:
            self.is_hung_up = True
            os.close(self._far_end)
            self._link.close()
            self._relaying.release()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Make it stdin and stdout of this process."""
        streams, kind = (sys.stdin, sys.stdout, sys.stderr), os.environ.get("TERM")
        for stream in streams[1:]:
            with contextlib.suppress(Exception):  # of a stream of the program's
                stream.flush()
        copies = [os.dup(number) for number in (0, 1)]
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
                os.dup2(copy, number)
                os.close(copy)
            del os.environ["TERM"]
            if kind is not None:
                os.environ["TERM"] = kind

    def close(self) -> None:
        """Close it once its output is sent; the connection, too."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)
        self.output.close()
        os.close(self._descriptor)
        self._relaying.acquire(timeout=_CLOSE_TIMEOUT)  # a program that ends now would end the relay first


class _Debugger(pdb.Pdb):
    """pdb on a terminal that may go away; the program goes on without it when it has ``ended``."""

    def __init__(self, terminal: _Terminal, own_files: Collection[str]) -> None:
        super().__init__(stdout=terminal.output)
        self.use_rawinput = 1  # type: ignore[assignment]
        self.ended = False
        self._terminal = terminal
        self._own_files = own_files

    def is_attached(self) -> bool:
        """Return whether the user still has the terminal; close it otherwise."""
        if not self.ended and self._terminal.is_hung_up:
            self.do_detach("")
            self._terminal.close()
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
            self._terminal.close()

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
        return True

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


def _send(link: socket.socket, **message: Any) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")
