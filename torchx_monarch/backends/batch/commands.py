# SPDX-License-Identifier: BSD-3-Clause
"""Run the commands of a batch system."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from torchx_monarch.backends.core.errors import BackendError

_TIMEOUT = 60.0
"""Seconds that a command may take: a batch system may answer late under load."""


def run(command: Sequence[str], environ: Mapping[str, str], install: str) -> str:
    """Run a command of a batch system and return what it prints.

    Args:
        install: what to install if it is missing.

    Raises:
        BackendError: it is missing, fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process, which needs the answer (``BatchBackend.submit``)
        )
    except FileNotFoundError:
        raise BackendError(f"{command[0]!r} is not on the PATH: install {install}") from None
    except OSError as error:
        raise BackendError(f"{command[0]!r} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise BackendError(f"`{' '.join(command[:2])}` has not answered for {_TIMEOUT:g} s") from None
    if done.returncode:
        answer = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise BackendError(f"{command[0]} refuses: {answer}")
    return done.stdout
