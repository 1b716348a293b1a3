# SPDX-License-Identifier: BSD-3-Clause
"""Ask replica 0 of a job for samples of its ranks."""

from __future__ import annotations

from torchx_monarch.client.host_query import query
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.target import Target
from torchx_monarch.insight.rank_sample import RankSample

_ANSWER_TIMEOUT = 12.0
"""Seconds to wait for the answer of replica 0, which waits for the other hosts."""


def ask_samples(hosts: Hosts) -> tuple[list[RankSample], dict[str, str]]:
    """Return a sample of each rank, in their order, and why a host has not answered, by replica.

    Raises:
        AllocationError: the job has ended.
        UnreachableError: replica 0 cannot be reached, or breaks the connection.
        RefusedError: replica 0 refuses the request: the hosts are not together.
    """
    return hosts.reach(lambda target: samples_at(target), wait=False)


def samples_at(target: Target, timeout: float = _ANSWER_TIMEOUT) -> tuple[list[RankSample], dict[str, str]]:
    """Return the same from a known replica 0.

    Args:
        timeout: seconds to wait for its answer.

    Raises:
        UnreachableError: it cannot be reached, or breaks the connection.
        RefusedError: it refuses the request: the hosts are not together.
    """
    samples, missing = query(target, {"type": "samples"}, RankSample, timeout)
    return sorted(samples, key=lambda sample: sample.rank), missing
