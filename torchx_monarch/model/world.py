# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of one attempt, as the controller sends them to every host, and the errors for ranks that do not start."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable


class CommandError(ValueError):
    """A command or the metadata of its role is invalid or not supported; the message names the allowed values."""


class LaunchError(Exception):
    """Raised when a host cannot start its ranks; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class HostRange:
    """Hosts of an attempt with consecutive replica ids, in their order, and the same number of ranks each."""

    first: int
    count: int
    nproc: int

    @classmethod
    def listed(cls, hosts: Iterable[tuple[int, int]]) -> tuple[HostRange, ...]:
        """Return the ranges of hosts, given the replica and the number of ranks of each in the order of their ranks."""
        runs = itertools.groupby(enumerate(hosts), lambda entry: (entry[1][0] - entry[0], entry[1][1]))
        ranges = [(key[1], list(entries)) for key, entries in runs]
        return tuple(cls(entries[0][1][0], len(entries), nproc) for nproc, entries in ranges)


@dataclasses.dataclass(frozen=True)
class HostPlace:
    """The place of a host in an attempt: its GROUP_RANK, the rank of its local rank 0, and its LOCAL_WORLD_SIZE."""

    group_rank: int
    first_rank: int
    nproc: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks of one attempt and the address of their store. Each of thousands of hosts gets all of it.

    Attributes:
        log_attempt: N of the log folders ``attempt_N``; it keeps counting when the backend restarts the job.
        restart_count: TORCHELASTIC_RESTART_COUNT: the number of earlier attempts, without those that ended because a
            host joined, which torchrun does not count either.
        hosts: the participating replicas in order; the position of a replica is its GROUP_RANK.
        restarts_used: how many of torchrun's ``--max-restarts`` the run has used.
        agent_store: whether a TCPStore already listens there (else rank 0's program serves it).
    """

    attempt: int
    log_attempt: int
    restart_count: int
    hosts: tuple[HostRange, ...]
    master_addr: str
    master_port: int
    agent_store: bool
    run_id: str
    restarts_used: int = 0

    @property
    def size(self) -> int:
        return sum(hosts.count * hosts.nproc for hosts in self.hosts)

    @property
    def host_count(self) -> int:
        """GROUP_WORLD_SIZE."""
        return sum(hosts.count for hosts in self.hosts)

    def place(self, replica: int) -> HostPlace:
        """Return the place of a replica that takes part; ``KeyError`` for another one."""
        group_rank = rank = 0
        for hosts in self.hosts:
            offset = replica - hosts.first
            if 0 <= offset < hosts.count:
                return HostPlace(group_rank + offset, rank + offset * hosts.nproc, hosts.nproc)
            group_rank, rank = group_rank + hosts.count, rank + hosts.count * hosts.nproc
        raise KeyError(replica)

    def replica_of(self, rank: int) -> int:
        """Return the replica that runs a rank."""
        for hosts in self.hosts:
            if rank < hosts.count * hosts.nproc:
                return hosts.first + rank // hosts.nproc
            rank -= hosts.count * hosts.nproc
        raise KeyError(rank)


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Return the ranges of consecutive numbers, each as its first and last number, in the order of the numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
