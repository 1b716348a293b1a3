# SPDX-License-Identifier: BSD-3-Clause
"""Check the limit on open files: whether it suffices for a host. Say which errors are those of a limit."""

from __future__ import annotations

import errno
import resource

_FILES_PER_HOST = 40
"""Open files of a host process with Monarch and a controller: with a limit of 32 the import of Monarch fails, with 44 a
job with one rank runs."""

_FILES_PER_RANK = 7
"""Open files of a host process for each rank: a channel, two pipes, a pidfd, two log files, the file for stacks."""


_FILES_PER_OTHER_HOST = 3
"""Open files of replica 0 for each other host: its connection to the rendezvous and two of Monarch's. Measured: 36 with
one rank, and 3 for each of 2, 4 and 8 hosts."""


def shortage(ranks: int, hosts: int = 1) -> str:
    """Return why a host cannot run under this process' limit; empty if it can."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _FILES_PER_HOST + _FILES_PER_RANK * ranks + _FILES_PER_OTHER_HOST * (hosts - 1)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    of_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
    which = f"a host with {of_ranks}" if hosts == 1 else f"replica 0 of {hosts} hosts, with {of_ranks},"
    return f"{_limit()}: {which} needs {needed} open files or more (ulimit -n)"


def hint(error: BaseException) -> str:
    """Return what to add to an error that a limit on open files or processes has caused; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f" ({_limit()})"
    if number == errno.EAGAIN:
        return " (the limit of processes: ulimit -u, or pids.max of the container)"
    return " (the limit of the whole machine, fs.file-max)" if number == errno.ENFILE else ""


def _limit() -> str:
    return f"RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
