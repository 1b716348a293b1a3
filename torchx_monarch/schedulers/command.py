# SPDX-License-Identifier: BSD-3-Clause
"""The ``torchx`` command that this process runs, as far as this package extends it, for this package's schedulers."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from torchx_monarch.exceptions import TorchXMonarchError


@dataclass(frozen=True)
class TorchXCommand:
    """A command of TorchX that this package extends.

    Attributes:
        options: its options as TorchX has parsed them; of ``run --stdin``, as its JSON says.
        log_stream: where it prints the logs of jobs; None for other commands, and if the stream is closed.
        brief: whether the state of a job is enough for it, so that it works for a job with damaged files too.
    """

    options: argparse.Namespace
    log_stream: TextIO | None = None
    brief: bool = False

    @property
    def waits(self) -> bool:
        """Whether it is a ``torchx run`` that waits for the end of the job that it submits."""
        return bool(getattr(self.options, "wait", False) or getattr(self.options, "log", False))


running: TorchXCommand | None = None
"""The command that this process runs; None in any other program, and in commands of TorchX that are not extended."""


@contextlib.contextmanager
def run(options: argparse.Namespace, log_stream: TextIO | None = None, *, brief: bool = False) -> Iterator[None]:
    """Enclose a command. It ends with one line for an error of this package, where TorchX shows a traceback."""
    global running
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, TorchXMonarchError):  # `torchx log` raises it again in the main thread
            before(args)

    running, threading.excepthook = TorchXCommand(options, log_stream, brief), hook
    try:
        yield
    except TorchXMonarchError as error:
        if hasattr(options, "sub_command"):  # `torchx monarch` shows errors itself, and has exit codes for them
            raise
        print(error, file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    finally:
        running, threading.excepthook = None, before
