# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of one attempt, as the controller tells every host, and the error of a host that cannot launch its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


class LaunchError(Exception):
    """The ranks of this host could not be started; the message says why."""


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks of one attempt and where they meet.

    Attributes:
        attempt: counts from 0.
        log_attempt: N of the folders ``attempt_N``; runs on when the backend has started the job again.
        restart_count: TORCHELASTIC_RESTART_COUNT: the attempts before this one, but for those that ended because a host
            joined, which torchrun does not count either.
        replicas: ids of the replicas that take part, in order; the position of one is its GROUP_RANK.
        local_world_sizes: ranks of each of them.
        master_addr: what the ranks dial.
        master_port: the TCP port of the store.
        agent_store: whether a TCPStore is already served there (else rank 0's program serves it).
        run_id: TORCHELASTIC_RUN_ID.
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

    @property
    def size(self) -> int:
        """Ranks in all."""
        return sum(self.local_world_sizes)

    def first_rank(self, replica: int) -> int:
        """The global rank of a replica's local rank 0: ranks are numbered replica by replica."""
        return sum(self.local_world_sizes[: self.group_rank(replica)])

    def group_rank(self, replica: int) -> int:
        """Which of those that take part a replica is."""
        return self.replicas.index(replica)

    def to_json(self) -> dict[str, Any]:
        """As the plain values that a message carries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> World:
        """The inverse of ``to_json``."""
        tuples = {name: tuple(values[name]) for name in ("replicas", "local_world_sizes")}
        return cls(**{**values, **tuples})
