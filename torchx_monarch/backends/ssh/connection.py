# SPDX-License-Identifier: BSD-3-Clause
"""A connection to a machine: the system's ssh, with this package's entry (``in_job.entry``) at its other end.

It carries orders and answers, a JSON object a line each, and stays open: OpenSSH's ControlMaster would save the login
as well, but each order would start a Python interpreter, 75 ms and as much CPU time of a machine that trains, while a
job that is watched is asked three times a second. No word of a user is on a command line: ssh starts a shell that reads
as many bytes of its input as a number says, and runs them as a script.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.ssh.in_job.wire import PYTHON_FILE, READY
from torchx_monarch.system import safe_files

_CONNECT_TIMEOUT = 10
"""Seconds in which a machine must answer ssh."""

_SILENT_TIME = 10.0
"""Seconds for which a machine that did not answer is not asked for the state of its replicas again."""

_START_TIMEOUT = 30.0
"""Seconds in which it must also have run the setup commands and started Python."""

_ANSWER_TIMEOUT = 60.0
"""Seconds in which a machine must answer an order while its connection is alive, which ssh itself watches."""

_END_TIMEOUT = 5.0
"""Seconds that ssh has to end."""

_MAX_THREADS = 32

_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={_CONNECT_TIMEOUT}",
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

_NAME = re.compile(
    r"(?:(?P<user>[^@\s/-][^@\s/]*)@)?(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s@:/\[\]-][^\s@:/\[\]]*))(?::(?P<port>\d+))?"
)

R = TypeVar("R")


class SshError(BackendError):
    """Raised when ssh is missing, or a machine cannot be reached or refuses; ``reason`` is what either has said."""

    def __init__(self, machine: str, reason: str) -> None:
        super().__init__(f"{machine}: {reason}" if machine else reason)
        self.reason = reason


class RefusedOrderError(SshError):
    """Raised when a machine was reached and could not do what it was asked."""


def find_ssh() -> str:
    ssh = shutil.which("ssh")
    if ssh is None:
        raise SshError("", "`ssh` is not on the PATH; install OpenSSH's client (Debian: openssh-client)")
    return ssh


def ssh_arguments(machine: str) -> list[str]:
    """Return the arguments of ssh that name a machine. (An ``ssh://`` URI may hold no IPv6 address, OpenSSH 9.2.)

    Raises:
        UserError: it is no machine; a name that begins with ``-`` would be an option of ssh.
    """
    found = _NAME.fullmatch(machine)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise UserError(
            f"Run option `hosts`: {machine!r} is no machine; machines are HOST, USER@HOST, HOST:PORT, USER@[IPV6]:PORT"
        )
    port = ["-p", str(int(found["port"]))] if found["port"] else []
    user = ["-l", found["user"]] if found["user"] else []
    return [*port, *user, "--", found["v6"] or found["host"]]


class MachineConnection:
    """A connection to one machine, which the first order opens. Threads may share it.

    Args:
        python: the Python interpreter there; empty for the one that has started an app there last.
        setup: the shell commands before it.
    """

    def __init__(self, machine: str, python: str, setup: str) -> None:
        self._machine, self._python, self._setup = machine, python, setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._silence: tuple[float, SshError] | None = None
        """Until when (``time.monotonic``) the machine counts as silent, and what ssh has said."""

    def ask(self, order: str, *, may_reconnect: bool = True, **fields: Any) -> Any:
        """Send an order and return its answer.

        Args:
            may_reconnect: whether a connection that is lost may be opened again: the machine may have been rebooted
                since the last order. Not for an order that relies on an earlier one.
        """
        request = json.dumps({"order": order, **fields}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._process is not None:
                try:
                    return self._exchange(request)
                except SshError as error:
                    if not may_reconnect or isinstance(error, RefusedOrderError):
                        raise
            elif not may_reconnect:
                raise SshError(self._machine, "the connection was lost")
            if order in ("read", "log") and self._silence is not None and time.monotonic() < self._silence[0]:
                raise self._silence[1]
            return self._exchange(request)

    def _exchange(self, request: bytes) -> Any:
        try:
            if self._process is None:
                self._connect()
            line = self._talk(request, _ANSWER_TIMEOUT)
            try:
                answer = safe_files.parse_json(line)
            except ValueError:
                raise SshError(self._machine, f"it has answered {line[:200]!r}") from None
        except BaseException:  # after a Ctrl-C, the next answer would be that to this order
            self.close()
            raise
        if "refused" in answer:
            raise RefusedOrderError(self._machine, answer["refused"])
        return answer["answer"]

    def _connect(self) -> None:
        python = shlex.quote(self._python) if self._python else _LATEST_PYTHON
        setup = f"{{\n{self._setup or ':'}\n}} >&2 </dev/null"
        script = f"{setup}\nexec {python} -c {shlex.quote(_CODE)}\n".encode()
        options = [word for option in _OPTIONS for word in ("-o", option)]
        remote = f"exec sh -c 'eval \"$(dd bs=1 count={len(script)} 2>/dev/null)\"'"
        command = [find_ssh(), *options, *ssh_arguments(self._machine), remote]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is for the caller, which then ends what it has begun
        )
        began = time.monotonic()
        try:
            while self._talk(script, _START_TIMEOUT).strip() != READY.encode():
                script = b""  # the line was one of the shell's own files
        except SshError as error:
            if (now := time.monotonic()) > began + _CONNECT_TIMEOUT / 2:
                self._silence = now + _SILENT_TIME, error
            raise

    def _talk(self, data: bytes, timeout: float) -> bytes:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        line = b""
        try:
            with contextlib.suppress(OSError, ValueError):  # ssh has ended, or another thread closes the connection
                process.stdin.write(data)
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT)
            self._stderr.seek(0)
            stderr = self._stderr.read()[-4000:].decode(errors="replace").strip()
            raise SshError(self._machine, explain(stderr, process.poll(), self._python))
        return line

    def close(self) -> None:
        """End it; the entry at its other end ends by itself."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # what could not be sent
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:  # it is stopped
            process.kill()
            process.wait()
        self._stderr.close()


def explain(stderr: str, code: int | None, python: str) -> str:
    """Return what went wrong in words, with what to do; ``code`` is the exit code of ssh, None if it runs."""
    if code == -signal.SIGKILL:
        return "it does not answer"
    python = python or "its Python interpreter"
    last = stderr.splitlines()[-1] if stderr else ""
    if code == 255:
        if "host key verification failed" in stderr.lower():
            return f"{last} ssh does not know this host key; log in once by hand (ssh) and accept it"
        if "permission denied" in stderr.lower():
            return f"{last} It must let you in without a password: add your key (ssh-copy-id, ssh-add)"
        return last or "ssh could not connect"
    if "No module named 'torchx_monarch" in stderr:
        return f"{python} lacks torchx-monarch; install it there, or name another interpreter (-cfg python=PATH)"
    if code in (126, 127):
        return f"{last or python}: name the Python interpreter of that machine (-cfg python=PATH)"
    return f"{python} did not start ({last or f'exit code {code}'}); see the run options python and setup"


def at_once(
    call: Callable[[str], R], machines: Collection[str], *, needs_all: bool = False
) -> tuple[dict[str, R], dict[str, SshError]]:
    """Call a function for each machine at once; return the results, and the errors of machines that are not reached.

    Raises:
        SshError: a machine refuses, none is reached, or with ``needs_all``, one is not; after all calls have ended.
    """
    answers, lost = dict[str, R](), dict[str, SshError]()
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        calls = {machine: pool.submit(call, machine) for machine in machines}
    for machine, ended in calls.items():
        try:
            answers[machine] = ended.result()
        except SshError as error:
            lost[machine] = error
    for reason in lost.values():
        if needs_all or not answers or isinstance(reason, RefusedOrderError):
            raise reason
    return answers, lost
