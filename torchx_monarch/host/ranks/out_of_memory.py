# SPDX-License-Identifier: BSD-3-Clause
"""Detect out-of-memory kills on this host from the counters of its cgroup, version 1 or 2, which its ranks share.

Without a counter (the root cgroup of version 2) nothing is said: the machine's counts processes of other jobs, too.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchx_monarch.system.cgroups import LIMITS, NO_LIMIT, own_cgroups, read_number, read_text

_COUNTERS = ("memory.events", "memory.oom_control")
"""Files of cgroup versions 2 and 1 with a line ``oom_kill N``: how many processes of the cgroup were OOM-killed."""


class OutOfMemory:
    """Count OOM kills since this object was created; ``root`` is the folder that contains ``proc`` and ``sys``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._cgroups = own_cgroups(root)
        counters = [cgroup / name for cgroup in self._cgroups for name in _COUNTERS]
        self._counter = next((path for path in counters if _count(path) is not None), root / "none")
        self._kills_before = _count(self._counter) or 0

    def evidence(self) -> str:
        """Return why a rank of this host may have died of SIGKILL; empty if the kernel has OOM-killed no process.

        The counters do not say which process it was: it may have been one that the rank had started.
        """
        if (number := (_count(self._counter) or 0) - self._kills_before) <= 0:
            return ""
        # The lowest limit of the cgroup and its parents.
        limits = [read_number(cgroup / name) for cgroup in self._cgroups for name in LIMITS]
        limit = min((limit for limit in limits if 0 < limit < NO_LIMIT), default=0)
        bound = f" (the memory limit of its cgroup is {limit / 2**20:.0f} MiB)" if limit else ""
        processes = "1 process" if number == 1 else f"{number} processes"
        return (
            f"probably for want of memory: the kernel's OOM killer has killed {processes} of its cgroup since the "
            f"ranks were started{bound}"
        )


def _count(path: Path) -> int | None:
    """Return N of the line ``oom_kill N``; None if the file has no such line."""
    found = re.search(r"^oom_kill (\d+)", read_text(path), re.M)
    return int(found[1]) if found else None
