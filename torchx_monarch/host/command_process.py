# SPDX-License-Identifier: BSD-3-Clause
"""Start the command of a replica as the one process of its host: it is to see no difference to a start without a host.

It has the host's environment without what only hosts have, its stdin, working folder, limits and umask, leads a session
and a process group, and writes to pipes. It starts before the host process has imported most of its modules.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Mapping

from torchx_monarch.host.no_restart_marker import VARIABLE as MARKER_VARIABLE
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.host_result import KEY_VARIABLE
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system import error_files, processes

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the host process handles. They stay pending from the start of a command until it does."""

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_FOR_HOSTS_ALONE = (
    CREDENTIALS,
    KEY_VARIABLE,
    "MONARCH_TERMINATION_LOG",
    "MONARCH_NODE",
    "MONARCH_HOST_ADDRESS",
)
"""Variables that backends give to hosts, and not to a command that has none."""


@dataclasses.dataclass(frozen=True)
class StartedCommand:
    """The process of a command, or why it could not be started.

    Attributes:
        process: the process, with pipes for its stdout and stderr; None if it could not be started.
        failure: why not; empty if it was.
        code: its exit code then, as a shell's: 127 if there is no such program, else 126.
        started: when it was started, in seconds since the epoch.
    """

    process: subprocess.Popen[bytes] | None
    failure: str = ""
    code: int = 0
    started: float = dataclasses.field(default_factory=time.time)


def start_early(options: HostSpec, environ: Mapping[str, str]) -> StartedCommand | None:
    """Start the command of a replica, unless it is to wait for other hosts, or may have to be left out."""
    if path := environ.get(_ERROR_FILE):
        error_files.set_aside(path, 0)  # a container that is restarted has that of its last start
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    if options.starts == "together" or MARKER_VARIABLE in environ:
        return None
    return start_command(options.command, command_environ(environ))


def command_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command whose host has this environment."""
    left_out = set(_FOR_HOSTS_ALONE)
    with open("/proc/self/environ", "rb") as file:  # what this process was started with
        if not any(variable.startswith(b"LC_CTYPE=") for variable in file.read().split(b"\0")):
            left_out.add("LC_CTYPE")  # Python sets it where the locale is C
    return {name: value for name, value in environ.items() if name not in left_out}


def start_command(words: tuple[str, ...], environ: Mapping[str, str]) -> StartedCommand:
    """Start a command."""
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return StartedCommand(processes.spawn(words, environ, os.getcwd(), **pipes))
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        code = 127 if isinstance(error, FileNotFoundError) else 126
        return StartedCommand(None, f"{error}{processes.limit_hint(error)}", code)
