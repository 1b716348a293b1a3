# SPDX-License-Identifier: BSD-3-Clause
"""Connections to machines: the system's ssh, with this package's entry (``in_job.entry``) at the other end.

A connection carries requests and answers, a JSON object a line each, and lives until it is closed: a job that is
watched costs no new login each second. No word of a user is on a command line: ssh starts a shell that reads as many
bytes of its input as the first number says, and runs them as a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.ssh.in_job.wire import PYTHON_FILE, READY
from torchx_monarch.backends.ssh.options import MachineName
from torchx_monarch.system import safe_files

CONNECT_TIMEOUT = 10
"""Seconds in which a machine must answer ssh."""

_ANSWER_TIMEOUT = 60.0
"""Seconds in which a machine must answer a request while its connection is alive, which ssh itself watches."""

_REMEMBER_LOST = 5.0
"""Seconds for which a machine that could not be reached is not tried again."""

_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT}",
    "ServerAliveInterval=3",
    "ServerAliveCountMax=3",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
    "RequestTTY=no",
    "LogLevel=ERROR",
)

_CODE = "import sys; del sys.path[0]; from torchx_monarch.backends.ssh.in_job.entry import main; main()"

_LATEST_PYTHON = f'"$(cat "${{XDG_STATE_HOME:-$HOME/.local/state}}/torchx-monarch/{PYTHON_FILE}" || echo python3)"'
"""The interpreter that has started an app there last."""

T = TypeVar("T")
R = TypeVar("R")


class SshError(BackendError):
    """Raised when ssh is missing, or a machine cannot be reached or refuses.

    Attributes:
        machine: the machine; empty when ssh itself is missing.
        reason: what ssh or the machine has said.
    """

    def __init__(self, machine: str, reason: str) -> None:
        super().__init__(f"{machine}: {reason}" if machine else reason)
        self.machine = machine
        self.reason = reason


class RefusedOrderError(SshError):
    """Raised when a machine was reached and could not do what it was asked."""


class MachineConnection:
    """A connection to one machine.

    Args:
        python: the Python interpreter there; empty for the one that has started an app there last.

    Attributes:
        key: these three.

    Raises:
        SshError: it cannot be reached, or its Python lacks this package.
    """

    def __init__(self, machine: str, python: str, setup: str) -> None:
        self.machine = machine
        self.key = (machine, python, setup)
        self._lock = threading.Lock()
        ssh = shutil.which("ssh")
        if ssh is None:
            raise SshError("", "`ssh` is not on the PATH; install OpenSSH's client (Debian: openssh-client)")
        exe = shlex.quote(python) if python else _LATEST_PYTHON
        script = f"{{\n{setup or ':'}\n}} >&2 </dev/null\nexec {exe} -c {shlex.quote(_CODE)}\n".encode()
        options = [word for option in _OPTIONS for word in ("-o", option)]
        remote = f"exec sh -c 'eval \"$(dd bs=1 count={len(script)} 2>/dev/null)\"'"
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._text = ""
        self._process = subprocess.Popen(
            [ssh, *options, *MachineName.parse(machine).words, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C is for the caller, which then ends what it has begun
        )
        self._python = python
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        try:
            self._send(script)
            until = time.monotonic() + CONNECT_TIMEOUT + 20
            while self._line(until).strip() != READY.encode():
                pass  # what the shell's own files have said
        except BaseException:
            self.close()
            raise

    def ask(self, order: str, **fields: Any) -> Any:
        """Send an order and return its answer.

        Raises:
            RefusedOrderError: the machine could not carry it out.
            SshError: the connection is lost.
        """
        with self._lock:
            self._send(json.dumps({"order": order, **fields}, separators=(",", ":")).encode() + b"\n")
            return self._answer(self._line(time.monotonic() + _ANSWER_TIMEOUT))

    def stream(self, order: str, has_ended: Callable[[], bool] | None, **fields: Any) -> Iterator[Any]:
        """Send an order and yield its answers, until an answer is None.

        Args:
            has_ended: ends the wait for further answers; None for an order that ends by itself, as a word of the end
                would be the next order.
        """
        self._send(json.dumps({"order": order, **fields}, separators=(",", ":")).encode() + b"\n")
        is_end_sent = False
        while True:
            line = self._line(None, pause=1.0)
            if line:
                answer = self._answer(line)
                if answer is None:
                    return
                yield from answer
            elif has_ended is not None and not is_end_sent and has_ended():
                is_end_sent = True
                self._send(b'{"order":"ended"}\n')

    def _answer(self, line: bytes) -> Any:
        try:
            answer = safe_files.parse_json(line)
        except ValueError:
            raise self._lost(f"it has answered {line[:200]!r}") from None
        if "refused" in answer:
            raise RefusedOrderError(self.machine, answer["refused"])
        return answer["answer"]

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._lost() from None

    def _line(self, until: float | None, pause: float = 0.0) -> bytes:
        """Return the next line; with ``pause``, empty when there is none for so many seconds."""
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            wait = pause or max(0.0, (until or 0.0) - time.monotonic())
            if not self._selector.select(wait):
                if pause:
                    return b""
                raise self._lost("it does not answer")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise self._lost()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _lost(self, reason: str = "") -> SshError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if reason else 5)
        code = self._process.poll()
        self.close()
        return SshError(self.machine, reason or _explained(self._text, code, self._python))

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it; the entry at its other end ends by itself."""
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._said.closed:
            self._said.seek(0)
            self._text = self._said.read()[-4000:].decode(errors="replace").strip()
            self._said.close()


def _explained(said: str, code: int | None, python: str) -> str:
    """Return what went wrong in words, with what to do.

    Args:
        code: the exit code of ssh; None if it runs.
        python: the Python interpreter; empty for the one that has started an app there last.
    """
    python = python or "its Python interpreter"
    last = said.splitlines()[-1] if said else ""
    if code == 255:
        if "host key verification failed" in said.lower():
            return f"{last} ssh does not know this host key; log in once by hand (ssh) and accept it"
        if "permission denied" in said.lower():
            return f"{last} It must let you in without a password: add your key (ssh-copy-id, ssh-add)"
        return last or "ssh could not connect"
    if "No module named 'torchx_monarch" in said:
        return f"{python} lacks torchx-monarch; install it there, or name another interpreter (-cfg python=PATH)"
    if code in (126, 127):
        return f"{last or python}: name the Python interpreter of that machine (-cfg python=PATH)"
    return f"{python} did not start ({last or f'exit code {code}'}); see the run options python and setup"


class Machines:
    """Connections to machines, opened when they are needed."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, str], MachineConnection] = {}
        self._asking: Counter[tuple[str, str, str]] = Counter()
        self._lost: dict[str, tuple[float, SshError]] = {}
        self._lock = threading.Lock()

    def connect(self, machine: str, python: str, setup: str) -> MachineConnection:
        """Return a connection of the caller's own, which it closes."""
        return MachineConnection(machine, python, setup)

    def take(self, machine: str, python: str, setup: str) -> MachineConnection | None:
        """Return an open connection on which no order is under way; the caller then has it alone. None without one."""
        key = (machine, python, setup)
        with self._lock:
            if self._asking[key] or key not in self._open:
                return None
            return self._open.pop(key)

    def keep(self, connection: MachineConnection) -> None:
        """Keep a caller's connection for later orders. All of its orders must have been answered to the end."""
        self._put(connection)

    def ask(self, machine: str, python: str, setup: str, order: str, **fields: Any) -> Any:
        """Send an order, which may be repeated, to a machine and return its answer.

        Raises:
            SshError: it cannot be reached, or could not carry it out.
        """
        key = (machine, python, setup)
        with self._lock:
            connection = self._open.get(key)
            self._asking[key] += 1
        try:
            if connection is not None and connection.is_open:
                try:
                    return connection.ask(order, **fields)
                except RefusedOrderError:
                    raise
                except SshError:
                    connection.close()  # the machine may have been rebooted since
            return self._opened(key).ask(order, **fields)
        finally:
            with self._lock:
                self._asking[key] -= 1

    def _opened(self, key: tuple[str, str, str]) -> MachineConnection:
        """Open a connection; raise what was found a moment ago for a machine that could not be reached."""
        with self._lock:
            when, error = self._lost.get(key[0], (0.0, None))
        if error is not None and time.monotonic() < when + _REMEMBER_LOST:
            raise error
        try:
            connection = MachineConnection(*key)
        except SshError as lost:
            with self._lock:
                self._lost[key[0]] = time.monotonic(), lost
            raise
        return self._put(connection)

    def _put(self, connection: MachineConnection) -> MachineConnection:
        """Hold a connection, unless another one to its machine can be used; return that one, and close the other."""
        with self._lock:
            other = self._open.get(connection.key)
            held, needless = (connection, other) if other is None or not other.is_open else (other, connection)
            self._open[connection.key] = held
        if needless is not None:
            needless.close()
        return held

    def forget_lost(self) -> None:
        """Try machines again that could not be reached."""
        with self._lock:
            self._lost.clear()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections, self._open = list(self._open.values()), {}
        for connection in connections:
            connection.close()


def concurrently(call: Callable[[T], R], items: Iterable[T]) -> list[R | SshError]:
    """Call a function for each item at once; return results and SshErrors in their order."""
    todo = list(items)

    def result_of(item: T) -> R | SshError:
        try:
            return call(item)
        except SshError as error:
            return error

    if len(todo) < 2:
        return [result_of(item) for item in todo]
    with ThreadPoolExecutor(min(32, len(todo))) as pool:
        return list(pool.map(result_of, todo))
