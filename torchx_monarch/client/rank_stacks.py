# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ask replica 0 of a job for the stacks of its ranks (see ``controller.stack_requests``)."""

from __future__ import annotations

from collections.abc import Mapping

from torchx_monarch.client.connection import Connection
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.insight.stacks import ProcessStacks
from torchx_monarch.model.codec import DecodeError, decode

_ANSWER_TIMEOUT = 40.0
"""Seconds to wait for the answer of replica 0, which waits for the other hosts and, with ``native``, for py-spy."""


def ask_stacks(
    hosts: Hosts, rank: int | None = None, native: bool = False
) -> tuple[list[ProcessStacks], dict[str, str]]:
    """Return the stacks of the ranks that run, and why a host has not answered, by replica.

    Args:
        hosts: the hosts of the job.
        rank: the only global rank that is asked; None for all.
        native: whether py-spy reads the stacks as well, with the functions of C libraries.

    Raises:
        AllocationError: the job has ended.
        UnreachableError: replica 0 cannot be reached, or breaks the connection.
        RefusedError: replica 0 refuses the request: the hosts are not together, or have no ranks.
    """
    greeting = {"type": "stacks", "rank": rank, "native": native}
    return hosts.reach(lambda target: _ask(target, greeting), wait=False)


def _ask(target: Target, greeting: Mapping[str, object]) -> tuple[list[ProcessStacks], dict[str, str]]:
    found: list[ProcessStacks] = []
    with Connection.open(target, dict(greeting)) as link:
        while True:
            answer = link.answer(_ANSWER_TIMEOUT)
            if answer.get("type") == "end":
                return found, {str(replica): str(why) for replica, why in dict(answer.get("missing") or {}).items()}
            try:
                found += [decode(ProcessStacks, one) for one in answer.get("stacks") or ()]
            except DecodeError as error:
                raise UnreachableError(f"{target.address}: not the stacks of a rank: {error}") from None
