# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which host takes over when the leader of a job is lost, and where it listens: pure functions of the job's record.

The successors are the first of the registered hosts. Each has a term and an address of its own, which all hosts derive
from the record, so no host has to ask another for them. A successor that is lost too is passed over after a time-out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torchx_monarch.model.job_record import JobRecord
from torchx_monarch.transport.connections import Address

SUCCESSORS = 8
"""Hosts that may take over. More than these are hardly lost together, and each costs the others a time-out."""


def successors(record: JobRecord) -> list[tuple[int, int]]:
    """Return the replicas that take over, in their order, each with the term that it has as leader."""
    return [(replica, record.term + 1 + place) for place, replica in enumerate(record.hosts[:SUCCESSORS])]


def suffice(record: JobRecord, fewest: int) -> bool:
    """Return whether the hosts that remain without the leader are as many as the job needs."""
    return len(record.hosts) >= fewest


def listener_of(address: Address, term: int, registered: str = "") -> Address:
    """Return the address at which the leader of a term listens for hosts.

    Args:
        address: replica 0's.
        term: the leader's term.
        registered: the address with which the leader has registered (``Registration.listener``); empty on one machine,
            where it listens at a socket file of its term.
    """
    if not term:
        return address
    if registered:
        return Address.parse(registered, "the address of a host that takes over")
    return dataclasses.replace(address, path=f"{address.path}.{term}")


def listeners(record: JobRecord) -> dict[int, str]:
    """Return the addresses at which the successors listen, by replica; empty on one machine."""
    return dict(zip(record.hosts, record.listeners, strict=False))


def without_leader(record: JobRecord) -> JobRecord:
    """Return the record of a job whose leader is known to have ended."""
    return dataclasses.replace(record, voters=tuple(each for each in record.voters if each != record.leader))


def places(record: JobRecord, leader: int) -> list[int]:
    """Return the places of the attempt for a new leader, which has the first: the controller gives out rank 0's port.

    The lost leader gets the former place of the new one, and another host takes its place there.
    """
    swapped = {record.leader: leader, leader: record.leader}
    return [swapped.get(replica, replica) for replica in record.places]


def absent(record: JobRecord, leader: int, replicas: int) -> Collection[int]:
    """Return the replicas that a new leader does not wait for: they were not registered, or would precede it."""
    return {replica for replica in range(replicas) if replica < leader or replica not in record.hosts}


def why_deposed(own: int, other: int) -> str:
    """Return why a leader of the term ``own`` must end, when a host has followed ``other``; empty if it need not."""
    return f"another host has taken over the job (term {other}, and this one has {own})" if other > own else ""
