# SPDX-License-Identifier: BSD-3-Clause
"""The process of a zygote. That of a batch job starts before the host process has imported most of its modules."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from torchx_monarch.command.command import CommandError, parse
from torchx_monarch.host.ranks.run_spec import RunSpec, with_interpreter
from torchx_monarch.model.host_spec import HostSpec

_ZYGOTE_MAIN = str(Path(__file__).with_name("zygote_main.py"))


class ZygoteProcess:
    """Start a zygote, which begins to import the modules of a run.

    Attributes:
        process: the process, a child of this one.
        started: when it was started, in seconds since the epoch.
        channel: the socket on which it answers; the first answer is that to the order to import.
        signature: equal for runs whose ranks can be forks of this zygote (``RunSpec.signature``).

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, run: RunSpec, count: int, umask: int = -1) -> None:
        self.signature = run.signature(count)
        self.channel, far_end = socket.socketpair()
        self.started = time.time()
        title = f"torchx-monarch zygote {' '.join(run.preload)}"
        with far_end:
            try:
                self.process = subprocess.Popen(
                    [*run.zygote_command(), _ZYGOTE_MAIN, str(far_end.fileno()), str(os.getpid()), title],
                    pass_fds=(far_end.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    start_new_session=True,
                    env=run.start_environ(count),
                    umask=umask,
                    cwd=run.start_folder(),
                )
            except OSError:
                self.channel.close()
                raise
        self.process.returncode = 0  # without this, it would wait for the process, which ``Zygote`` owns
        program = run.command.program_of(0)
        # The program and its folder are not known on an allocation before a run.
        mode, target = (program.mode, program.target) if run.cwd is None else ("exec", "")
        order = {"op": "import", "mode": mode, "target": target, "modules": run.preload}
        with contextlib.suppress(OSError):  # it has ended, which the next reader of the channel learns
            self.channel.sendall(json.dumps(order).encode() + b"\n")


def start_early(options: HostSpec, environ: Mapping[str, str]) -> ZygoteProcess | None:
    """Start the zygote of a batch job; None if what it is to import is not known yet, or it cannot be started.

    The host reports why.
    """
    try:
        command = parse(options.command, environ)
        if command is None or command.kind in ("hosts", "actors"):
            return None
        command = with_interpreter(command, options, environ, os.getcwd())
    except CommandError:
        return None
    run = RunSpec(command, dict(environ), options.preload_modules)
    if not run.preload or not run.presumed_count or run.why_no_python():
        return None
    try:
        return ZygoteProcess(run, run.presumed_count)
    except OSError:
        return None
