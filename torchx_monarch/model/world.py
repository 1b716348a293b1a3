# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of one attempt, as the controller sends them to every host, and the errors for ranks that do not start."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable


class CommandError(ValueError):
    """A command or the metadata of its role is invalid or not supported; the message names the allowed values."""


class LaunchError(Exception):
    """Raised when a host cannot start its ranks; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks of one attempt and the address of their store.

    Attributes:
        log_attempt: N of the log folders ``attempt_N``; it keeps counting when the backend restarts the job.
        restart_count: TORCHELASTIC_RESTART_COUNT: the number of earlier attempts, without those that ended because a
            host joined, which torchrun does not count either.
        replicas: ids of the participating replicas, in order; the position of a replica is its GROUP_RANK.
        local_world_sizes: number of ranks of each of these replicas.
        restarts_used: how many of torchrun's ``--max-restarts`` the run has used.
        agent_store: whether a TCPStore already listens there (else rank 0's program serves it).
    """

    attempt: int
    log_attempt: int
    restart_count: int
    replicas: tuple[int, ...]
    local_world_sizes: tuple[int, ...]
    master_addr: str
    master_port: int
    agent_store: bool
    run_id: str
    restarts_used: int = 0

    @property
    def size(self) -> int:
        return sum(self.local_world_sizes)

    def first_rank(self, replica: int) -> int:
        """Return the global rank of a replica's local rank 0: ranks are numbered replica by replica."""
        return self._first_ranks[replica]

    @functools.cached_property
    def _first_ranks(self) -> dict[int, int]:
        return dict(zip(self.replicas, itertools.accumulate(self.local_world_sizes, initial=0), strict=False))

    def group_rank(self, replica: int) -> int:
        """Return the GROUP_RANK of a replica: its position among the participating replicas."""
        return self.replicas.index(replica)


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Return the ranges of consecutive numbers, each as its first and last number, in the order of the numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
