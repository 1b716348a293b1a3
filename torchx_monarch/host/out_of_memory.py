# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether the kernel has killed processes of this host for want of memory: what the counters of cgroups and /proc say.

The cgroup is the host process's own, where its ranks are as well; version 1 or 2. Where it counts nothing (the root of
version 2, an old kernel) there is the machine's counter, which includes the processes of others.
"""

from __future__ import annotations

from pathlib import Path

_COUNTERS = ("memory.events", "memory.oom_control")
"""Files of version 2 and 1 with a line ``oom_kill N``: processes in the cgroup that any OOM killer has killed."""

_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Of version 2 and 1. No limit is ``max``, or a number beyond any machine's memory."""

_NO_LIMIT = 2**60


class OutOfMemory:
    """Counts OOM kills from now on.

    Args:
        root: the file system in which ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._cgroups = _own_cgroups(root)
        self._counter = next(
            (each / name for each in self._cgroups for name in _COUNTERS if _count(each / name) is not None), None
        )
        self._kills_before, self._machine_before = self._kills()

    def evidence(self) -> str:
        """Why a process of this host that died of SIGKILL did so; empty where the kernel has killed none for memory."""
        kills, machine = self._kills()
        if kills > self._kills_before:
            limit = self._limit()
            where = f"the memory limit of its cgroup is {_in_mib(limit)}" if limit else "its cgroup has no memory limit"
            return f"the kernel killed it for want of memory ({where})"
        if self._counter is None and machine > self._machine_before:
            return "the kernel's OOM killer was active on this machine"
        return ""

    def _kills(self) -> tuple[int, int]:
        """Of this cgroup, and of the machine."""
        return (_count(self._counter) or 0 if self._counter else 0), _count(self._root / "proc/vmstat") or 0

    def _limit(self) -> int:
        """The lowest limit of the cgroup and those around it, in bytes; 0 for none."""
        limits = [_number(each / name) for each in self._cgroups for name in _LIMITS]
        return min((limit for limit in limits if 0 < limit < _NO_LIMIT), default=0)


def _own_cgroups(root: Path) -> list[Path]:
    """The folders of this process's memory cgroup and of those around it, the innermost first.

    In a container the path that ``/proc/self/cgroup`` names may be the machine's, and absent: then the innermost that
    is there is the container's own.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            break
        if not controllers:
            top = root / "sys/fs/cgroup"
            break
    else:
        return []
    here = top / path.strip("/")
    around = [here, *here.parents]
    return [each for each in around[: around.index(top) + 1] if each.is_dir()]


def _count(path: Path) -> int | None:
    """The number in a line ``oom_kill N``; None where there is no such line."""
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.isdigit():
            return int(number)
    return None


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _in_mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
