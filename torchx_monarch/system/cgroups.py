# SPDX-License-Identifier: BSD-3-Clause
"""The memory that the cgroups of this process, version 1 or 2, still allow it, and what the kernel has killed.

Every rank may import this.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files of cgroup versions 2 and 1. No limit is ``max``, or a number above any machine's memory."""

_USAGES = ("memory.current", "memory.usage_in_bytes")

NO_LIMIT = 2**60

_COUNTERS = ("memory.events", "memory.oom_control")
"""Files of cgroup versions 2 and 1 with a line ``oom_kill N``: how many processes of the cgroup were OOM-killed."""


def own_cgroups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's memory cgroup and its parents, innermost first; only those that exist.

    In a container, ``/proc/self/cgroup`` may name a path of the machine that does not exist here; the innermost parent
    that exists is then the container's own cgroup. ``root`` is the folder that contains ``proc`` and ``sys``.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            here = top / path.strip("/")
            around = [here, *here.parents]
            return [folder for folder in around[: around.index(top) + 1] if folder.is_dir()]
    return []


def room_in(folder: str | os.PathLike[str], root: Path = Path("/")) -> int:
    """Return the bytes that fit into a folder in memory: its file system has them free, and no cgroup forbids them."""
    found = os.statvfs(folder)
    room = found.f_bavail * found.f_frsize
    for cgroup in own_cgroups(root):
        for limit_name, usage_name in zip(LIMITS, _USAGES, strict=True):
            if 0 < (limit := read_number(cgroup / limit_name)) < NO_LIMIT:
                # The kernel drops what it has read of files before it kills a process.
                cached = re.search(r"^(?:total_)?inactive_file (\d+)", read_text(cgroup / "memory.stat"), re.M)
                room = min(room, limit - read_number(cgroup / usage_name) + (int(cached[1]) if cached else 0))
    return max(0, room)


def read_number(path: Path) -> int:
    found = read_text(path).strip()
    return int(found) if found.isdigit() else 0


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


class OutOfMemory:
    """Count OOM kills in the cgroup of this process, which its ranks share, since this object was created.

    Without a counter (the root cgroup of version 2) nothing is said: the machine's counts processes of other jobs, too.
    """

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
