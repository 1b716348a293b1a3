# SPDX-License-Identifier: BSD-3-Clause
"""The exit codes of ``torchx monarch``. A sub-command that shows a run exits with the run's own code."""

from __future__ import annotations

import os

from torchx_monarch.exceptions import TorchXMonarchError

FAILED = 1
"""1: a check of ``doctor`` has failed, a job runs that is to be deleted, or a program has not survived a ``drill``."""

USAGE = os.EX_USAGE
"""64: an argument has a wrong value, or names several apps. An unknown option is 2, the code of ``argparse``."""

UNKNOWN_APP = os.EX_NOINPUT
"""66: there is no such app."""

UNAVAILABLE = os.EX_UNAVAILABLE
"""69: the hosts or the scheduler cannot be reached, or refuse the request."""

OUTPUT = os.EX_IOERR
"""74: the output cannot be written: the disk is full."""

BROKEN_PIPE = 141
"""Nobody reads the output any more: a shell's code for SIGPIPE."""


class CommandError(TorchXMonarchError):
    """Raised to end a command with a message and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
