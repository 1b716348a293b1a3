# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Finds host processes that are stopped (SIGSTOP) for longer than their lease.

The hosts of a role find each other by their own leases (``transport.lease``). What they cannot do is end a stopped
host, so that it is replaced, nor find one when all of them, or the only one, are stopped.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchx_monarch.system import processes


class StoppedHosts:
    """Counts for how many looks in a row a host has been found stopped.

    Looks, not seconds: the supervisor may have been stopped as well, and all of them go on together.

    Args:
        lease: seconds for which a host may be stopped.
        every: seconds between two looks.
    """

    def __init__(self, lease: float, every: float) -> None:
        # One look more than the lease: the other hosts, whose leases have expired before, say more of it.
        self._looks = int(lease / every) + 1
        self._every = every
        self._found: dict[int, int] = {}

    def look(self, replicas: Iterable[int]) -> dict[int, str]:
        """Look once.

        Args:
            replicas: the process of each replica.

        Returns:
            What is to be said of each whose lease has expired, by process.
        """
        hosts = processes.hosts(replicas)
        stopped = {host for found in hosts.values() for host in found if _is_stopped(host)}
        self._found = {host: self._found.get(host, 0) + 1 for host in stopped}
        expired: dict[int, str] = {}
        for replica, found in hosts.items():
            for host in found:
                if (looks := self._found.get(host, 0)) > self._looks:
                    seconds = looks * self._every
                    expired[replica] = f"its host (pid {host}) does not answer: stopped (SIGSTOP) for {seconds:g} s"
        return expired


def _is_stopped(pid: int) -> bool:
    found = processes.process(pid)
    return found is not None and found.state == "T"
