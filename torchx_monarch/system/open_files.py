# SPDX-License-Identifier: BSD-3-Clause
"""Say which errors are those of a limit on open files or processes."""

from __future__ import annotations

import errno
import resource


def hint(error: BaseException) -> str:
    """Return what to add to an error that a limit on open files or processes has caused; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f" (RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: ulimit -n)"
    if number == errno.EAGAIN or str(error) == "can't start new thread":  # a RuntimeError
        return " (the limit of processes: ulimit -u, or pids.max of the container)"
    return " (the limit of the whole machine, fs.file-max)" if number == errno.ENFILE else ""
