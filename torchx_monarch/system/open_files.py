# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The limit of open files: whether a host can do with it, and what to say of an error for want of descriptors."""

from __future__ import annotations

import errno
import resource

_OF_A_HOST = 40
"""Open files of a host process with Monarch and a controller: with 32 the import of Monarch fails, with 44 and one rank
a job runs."""

_OF_A_RANK = 6
"""Of a host process for each rank: its channel, its two pipes, its pidfd, its two log files."""


def shortage(ranks: int) -> str:
    """Why a host with this many ranks cannot run under the limit of this process; empty where it can."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _OF_A_HOST + _OF_A_RANK * ranks
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    of_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{_limit()}: a host with {of_ranks} needs {needed} open files or more (ulimit -n)"


def hint(error: BaseException) -> str:
    """What to add to an error for want of descriptors: the limit that was reached; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f" ({_limit()})"
    return " (the limit of the whole machine, fs.file-max)" if number == errno.ENFILE else ""


def _limit() -> str:
    return f"RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
