# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which side of a broken network goes on with a job."""

from __future__ import annotations

import itertools

import pytest

from torchx_monarch.controller import quorum
from torchx_monarch.controller.quorum import Quorum


@pytest.mark.parametrize(
    ("present", "voters", "new", "found"),
    [
        ("0", "01", False, True),  # at exactly half, the leader stays
        ("1", "01", True, False),
        ("1", "1", True, True),  # the leader is known to have ended
        ("12", "012", True, True),
        ("1", "012", True, False),
        ("0", "012", False, False),
        ("13", "0123", True, False),
        ("149", "012", True, False),  # hosts that came after the attempt began do not count
        ("1", "", True, True),  # all hosts are on one machine
        ("0", "", False, True),
    ],
)
def test_hosts_that_may_go_on(present: str, voters: str, new: bool, found: bool) -> None:
    here, all_of_them = [int(each) for each in present], [int(each) for each in voters]
    assert quorum.suffice(here, all_of_them, new=new) is found
    assert (quorum.why_not(here, all_of_them, new=new) == "") is found


@pytest.mark.parametrize("voters", range(1, 8))
def test_never_both_sides(voters: int) -> None:
    every = set(range(voters))
    for size in range(voters):
        for others in map(set, itertools.combinations(every - {0}, size)):
            old = quorum.suffice(every - others, every, new=False)
            assert not (old and quorum.suffice(others, every, new=True)), others


def test_former_voters_count_until_all_hosts_know_the_present_ones() -> None:
    votes = Quorum(0)
    assert not votes.voters and votes.why_not({0}) == ""  # before the first attempt
    votes.begin({0, 1, 2, 3})
    assert set(votes.voters) == {0, 1, 2, 3} and "1 of the 4 hosts" in votes.why_not({0})
    for replica in (1, 2, 3):
        votes.confirm(replica)
    votes.begin({0, 1})  # hosts 2 and 3 are silent
    assert set(votes.voters) == {0, 1}
    assert votes.why_not({0, 1}) == ""
    assert "1 of the 4 hosts" in votes.why_not({0})  # for host 1 may not know that two are enough
    votes.confirm(1)
    assert votes.why_not({0}) == ""


def test_a_host_that_has_ended_does_not_count() -> None:
    votes = Quorum(1, before=(1, 2, 3))
    votes.begin({1, 2, 3})
    votes.confirm(2)
    assert votes.why_not({1})
    votes.note_ended(3)
    assert votes.voters == (1, 2) and votes.why_not({1}) == ""
