# SPDX-License-Identifier: BSD-3-Clause
"""Run the user's commands for the end of a job and for what slows it (``-cfg on_end``, ``on_slow``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torchx_monarch.model.job_result import describe_code
from torchx_monarch.model.state import State
from torchx_monarch.system.untrusted_text import one_line

_TIMEOUT = 30.0
"""Seconds that the command has."""

_MAX_INPUT = 1 << 16
"""Characters of the message that are passed on; a pipe that is not read holds as many bytes."""

_MAX_SAID = 1000
"""Bytes that are read of what the command has written to stderr."""


@dataclass(frozen=True)
class JobEnd:
    """How a job has ended; the fields mean what they do in the JSON of ``torchx monarch status``.

    Attributes:
        id: the app's id, which ``torchx monarch`` takes as a handle.
        slow: what slowed its ranks until the end (``timeline.last_slow``).
    """

    id: str
    name: str
    state: State
    message: str
    exit_code: int | None
    started: float | None
    ended: float
    restarts: int
    slow: str | None = None

    def run(self, command: str, environ: Mapping[str, str]) -> str:
        """Run a shell command, which gets this as JSON on stdin; return what is to be said of its failure, if any."""
        data = {**asdict(self), "state": str(self.state), "message": self.message[:_MAX_INPUT]}
        return run_hook("on_end", command, data, environ)


def run_hook(option: str, command: str, data: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Run a shell command of a run option, which gets data as JSON on stdin.

    Returns: what is to be said of its failure; empty if it has succeeded.
    """
    try:
        failure = _run(command, json.dumps(data), environ)
    except OSError as error:  # it cannot be started, or there is no room for a temporary file
        failure = error.strerror or str(error)
    return f"the command of -cfg {option} has failed: {failure}" if failure else ""


def _run(command: str, text: str, environ: Mapping[str, str]) -> str:
    with tempfile.TemporaryFile() as said:  # a pipe may stay open in what the command leaves in the background
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=environ,
            start_new_session=True,
        )
        with process:
            try:
                process.communicate(text.encode(errors="backslashreplace"), _TIMEOUT)
            except subprocess.TimeoutExpired:
                return f"it has not ended within {_TIMEOUT:g} s, and was killed"
            finally:
                with contextlib.suppress(ProcessLookupError):  # also what is left in the background
                    os.killpg(process.pid, signal.SIGKILL)
        said.seek(0, os.SEEK_END)
        said.seek(max(0, said.tell() - _MAX_SAID))
        last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    failure = f"it {describe_code(process.returncode)}{f': {one_line(last, 200)}' if last else ''}"
    return failure if process.returncode else ""
