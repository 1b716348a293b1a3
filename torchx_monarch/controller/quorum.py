# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide which side of a broken network goes on with a job, so that its two sides never both do.

A host whose process is known to have ended is gone. A host that is merely silent may live beyond a broken link, with
others there. The leader therefore goes on only with at least half of the hosts that may live, and a host takes over
only with more than half of them. The hosts that count, the *voters*, are those that were registered when the attempt
began or have come since.
"""

from __future__ import annotations

from collections.abc import Collection


def suffice(present: Collection[int], voters: Collection[int], *, new: bool) -> bool:
    """Return whether the hosts on one side of a broken network may go on with the job.

    Args:
        present: replicas of the hosts on this side, the leader among them.
        voters: replicas of the hosts that count and may live; empty if there are none, or all hosts are on one machine.
        new: whether the leader is a new one. At exactly half, the old one stays.
    """
    here = len(set(present) & set(voters))
    return 2 * here > len(voters) or (2 * here == len(voters) and not (new and voters))


def why_not(present: Collection[int], voters: Collection[int], *, new: bool) -> str:
    """Return why the hosts on one side of a broken network may not go on; empty if they may (see ``suffice``)."""
    if suffice(present, voters, new=new):
        return ""
    here = len(set(present) & set(voters))
    need = "more than half of them are" if new else "half of them are"
    return (
        f"{here} of the {len(voters)} hosts that may live can be reached, and {need} needed: the others may go on with "
        "the job beyond a broken network"
    )


class Quorum:
    """Keep the voters of a leader.

    The voters change when an attempt begins, or a host comes. Until all of them have confirmed that they know the new
    voters, the former ones count as well: a host that is lost meanwhile may go by those.

    Args:
        leader: replica of the leader.
        before: the voters of the leader before it that may live; empty for replica 0.
    """

    def __init__(self, leader: int, before: Collection[int] = ()) -> None:
        self._leader = leader
        self._generations = [set(before)] if before else []
        self._unconfirmed: set[int] = set()

    @property
    def voters(self) -> tuple[int, ...]:
        """The present voters; empty before the first attempt."""
        return tuple(sorted(self._generations[-1])) if self._generations else ()

    def begin(self, present: Collection[int]) -> None:
        """Make hosts the voters."""
        self._generations.append(set(present))
        self._unconfirmed = set(present) - {self._leader}
        self._drop_former()

    def confirm(self, replica: int) -> None:
        """Note that a host knows the voters of the present attempt."""
        self._unconfirmed.discard(replica)
        self._drop_former()

    def note_ended(self, replica: int) -> None:
        """Note that the process of a host has ended."""
        for voters in self._generations:
            voters.discard(replica)
        self.confirm(replica)

    def why_not(self, present: Collection[int]) -> str:
        """Return why the leader must end, with the hosts that are present; empty if it may go on."""
        reasons = (why_not(present, voters, new=False) for voters in self._generations)
        return next(filter(None, reasons), "")

    def _drop_former(self) -> None:
        if not self._unconfirmed:
            del self._generations[:-1]
