# SPDX-License-Identifier: BSD-3-Clause
"""Ask replica 0 of a job for the stacks of its ranks."""

from __future__ import annotations

from torchx_monarch.client.host_query import query
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.insight.stacks import ProcessStacks

_ANSWER_TIMEOUT = 40.0
"""Seconds to wait for the answer of replica 0, which waits for the other hosts and, with ``native``, for py-spy."""


def ask_stacks(
    hosts: Hosts, rank: int | None = None, native: bool = False
) -> tuple[list[ProcessStacks], dict[str, str]]:
    """Return the stacks of the ranks that run, and why a host has not answered, by replica.

    Args:
        rank: the only global rank that is asked; None for all.
        native: whether py-spy reads the stacks as well, with the functions of C libraries.

    Raises:
        AllocationError: the job has ended.
        UnreachableError: replica 0 cannot be reached, or breaks the connection.
        RefusedError: replica 0 refuses the request: the hosts are not together, or have no ranks.
    """
    greeting = {"type": "stacks", "rank": rank, "native": native}
    return hosts.reach(lambda target: query(target, greeting, ProcessStacks, _ANSWER_TIMEOUT), wait=False)
