# SPDX-License-Identifier: BSD-3-Clause
"""Detect host processes that are stopped (SIGSTOP) for longer than their lease.

The hosts of a role detect the loss of each other by their own leases (``transport.lease``). They cannot end a stopped
host, so that it is replaced, and cannot detect one if all of them, or the only one, are stopped.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchx_monarch.system import processes


class StoppedHosts:
    """Count in how many consecutive checks each host was stopped.

    It counts checks, not seconds: the supervisor may have been stopped as well, and then continues with the hosts.

    Args:
        lease: seconds for which a host may be stopped.
        every: seconds between two checks.
    """

    def __init__(self, lease: float, every: float) -> None:
        # One check more than the lease: the leases of the other hosts expire first, and these hosts report more.
        self._checks = int(lease / every) + 1
        self._every = every
        self._found: dict[int, int] = {}

    def check(self, replicas: Iterable[int]) -> dict[int, str]:
        """Check all hosts once.

        Returns:
            A message for each replica with a host whose lease has expired, by the replica's pid.
        """
        hosts = processes.hosts(replicas)
        stopped = {host for found in hosts.values() for host in found if _is_stopped(host)}
        self._found = {host: self._found.get(host, 0) + 1 for host in stopped}
        return {
            replica: f"its host (pid {host}) does not answer: stopped (SIGSTOP) for {count * self._every:g} s"
            for replica, found in hosts.items()
            for host in found
            if (count := self._found.get(host, 0)) > self._checks
        }


def _is_stopped(pid: int) -> bool:
    found = processes.process(pid)
    return found is not None and found.state == "T"
