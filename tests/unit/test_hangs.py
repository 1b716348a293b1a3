# SPDX-License-Identifier: BSD-3-Clause
"""Which rank others wait for in a collective, from the state of each rank's collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from torchx_monarch.host.ranks.rank_recorder import format_ranks
from torchx_monarch.insight.group_calls import Collective, GroupStatus, parse_ranks
from torchx_monarch.insight.hangs import Fault, HostCollectives, RankCollectives, describe_places, diagnose
from torchx_monarch.insight.stacks import Frame, ProcessStacks, ThreadStack
from torchx_monarch.model.codec import decode

NOW = 1000.0

World = dict[int, list[GroupStatus] | None]


def at(
    number: int, waited: float | None = None, group: str = "0", ranks: tuple[int, ...] = (0, 1, 2, 3), **more: str
) -> GroupStatus:
    """A rank that has called ``number`` collectives of a group and waits in the last one; None: it has completed.

    Args:
        more: by ``cN``, other names of operations than that of an all_reduce.
    """
    recent = tuple(
        Collective(n, more.get(f"c{n}", "gloo:all_reduce"), ((7,),), NOW - (waited or 0)) for n in range(1, number + 1)
    )
    waiting = recent[-1] if waited is not None else None
    return GroupStatus(group, format_ranks(ranks), number, number - (waited is not None), waiting, recent)


def test_ranks_that_wait_inside_the_kernel_are_named_whether_or_not_others_wait() -> None:
    ranks = [RankCollectives(rank, NOW, (), kernel_wait=20.0 * rank) for rank in range(4)]
    hang = diagnose(as_received(ranks), 10.0, kernel_after=30.0)
    assert hang is not None
    assert hang.describe() == "ranks 2-3 have waited inside the kernel for 60 s"
    assert diagnose(ranks, 10.0, at_most=9.0, kernel_after=30.0) is None


def found(world: World, hang_after: float = 10.0, at_most: float = 1e9) -> tuple[Fault, tuple[int, ...], str] | None:
    ranks = [RankCollectives(rank, NOW, None if groups is None else tuple(groups)) for rank, groups in world.items()]
    hang = diagnose(ranks, hang_after, at_most)
    assert diagnose(as_received(ranks), hang_after, at_most) == hang
    return None if hang is None else (hang.fault, hang.ranks, hang.describe())


def as_received(ranks: Sequence[RankCollectives]) -> list[RankCollectives]:
    """The ranks as replica 0 gets them of hosts with two each."""
    hosts = [HostCollectives.from_ranks(ranks[at : at + 2], details=True) for at in range(0, len(ranks), 2)]
    answers = [decode(HostCollectives, json.loads(json.dumps(host, default=vars))) for host in hosts]
    return [rank for answer in answers for rank in answer.ranks()]


def waits(count: int, *others: GroupStatus, waited: float = 12.0) -> list[GroupStatus]:
    return [at(count, waited), *others]


SUB = {"group": "5", "ranks": (2, 3)}

HEALTHY: dict[str, World] = {
    "no rank": {},
    "before the first group": {0: [], 1: [], 2: [], 3: []},
    "all compute": {rank: [at(6)] for rank in range(4)},
    "all have called it": {rank: waits(6) for rank in range(4)},
    "not long enough": {0: waits(6, waited=9.9), 1: waits(6, waited=9.9), 2: waits(6, waited=3), 3: [at(5)]},
    "one is stopped, and nobody waits": {0: [at(6)], 1: [at(6)], 2: [at(6)], 3: None},
    "a wait by a clock that was set": {0: waits(6, waited=-100), 1: [at(5)], 2: [at(5)], 3: [at(5)]},
    "ranks of other groups": {0: [at(6)], 1: [at(6)], 2: [at(2, 12, **SUB)], 3: [at(2, 12, **SUB)]},  # type: ignore[arg-type]
}


@pytest.mark.parametrize("world", HEALTHY.values(), ids=HEALTHY)
def test_healthy_ranks(world: World) -> None:
    assert found(world) is None


HANGS: dict[str, tuple[World, Fault, tuple[int, ...], str]] = {
    "one is behind": (
        {0: waits(6), 1: waits(6), 2: waits(6, waited=2), 3: [at(5)]},
        Fault.MISSING,
        (3,),
        "rank 3 has not called gloo:all_reduce, number 6 of group 0, in which ranks 0-2 have waited for 12 s",
    ),
    "two are behind": (
        {0: waits(6), 1: [at(5)], 2: waits(6), 3: [at(2)]},
        Fault.MISSING,
        (1, 3),
        "ranks 1,3 have not called gloo:all_reduce, number 6 of group 0, in which ranks 0,2 have waited for 12 s",
    ),
    "one has no collective yet": ({0: waits(1), 1: waits(1), 2: waits(1), 3: [at(0)]}, Fault.MISSING, (3,), ""),
    "one has no group": (
        {0: waits(1), 1: waits(1), 2: waits(1), 3: []},
        Fault.NO_GROUP,
        (3,),
        "rank 3 has not formed the group, and so not called gloo:all_reduce, number 1 of group 0, in which ranks 0-2 "
        "have waited for 12 s",
    ),
    "one has ended": ({0: waits(6), 1: waits(6), 2: waits(6)}, Fault.ENDED, (3,), ""),
    "one is stopped": (
        {0: waits(6), 1: waits(6), 2: [at(5)], 3: None},
        Fault.SILENT,
        (3,),
        "rank 3 does not answer, and has not called gloo:all_reduce, number 6 of group 0, in which ranks 0-1 have "
        "waited for 12 s",
    ),
    "all of the others": ({0: waits(6), 1: [at(5)], 2: [at(5)], 3: [at(5)]}, Fault.MISSING, (1, 2, 3), ""),
    "another operation": (
        {0: waits(6), 1: waits(6), 2: waits(6), 3: [at(6, 12, c6="gloo:broadcast")]},
        Fault.MISMATCH,
        (3,),
        "rank 3 has called gloo:broadcast [7] as number 6 of group 0, the others gloo:all_reduce [7]; ranks 0-3 "
        "have waited for 12 s",
    ),
    "another order, and one goes on": (
        {0: waits(5), 1: waits(5), 2: waits(5), 3: [at(6, 12, c5="gloo:broadcast")]},
        Fault.MISMATCH,
        (3,),
        "",
    ),
    "the last ranks of a chain": (
        {0: waits(6), 1: waits(6), 2: [at(5), at(2, 12, **SUB)], 3: [at(5), at(1, **SUB)]},  # type: ignore[arg-type]
        Fault.MISSING,
        (3,),
        "",
    ),
    "a chain through a wait that is younger": (
        {0: waits(6), 1: waits(6), 2: [at(5), at(2, 1, **SUB)], 3: [at(6), at(1, **SUB)]},  # type: ignore[arg-type]
        Fault.MISSING,
        (3,),
        "rank 3 has not called gloo:all_reduce, number 2 of group 5, in which rank 2 has waited for 12 s",
    ),
    "a group of some ranks": (
        {0: [at(5)], 1: [at(5)], 2: [at(5), at(2, 12, **SUB)], 3: [at(5), at(1, **SUB)]},  # type: ignore[arg-type]
        Fault.MISSING,
        (3,),
        "rank 3 has not called gloo:all_reduce, number 2 of group 5, in which rank 2 has waited for 12 s",
    ),
    "two groups in different order": (
        {
            0: [at(1, 12, "1", (0, 1)), at(0, None, "2", (0, 1))],
            1: [at(0, None, "1", (0, 1)), at(1, 12, "2", (0, 1))],
        },
        Fault.ORDER,
        (1,),
        "rank 1 has not called gloo:all_reduce, number 1 of group 1, in which rank 0 has waited for 12 s; rank 1 waits "
        "in gloo:all_reduce, number 1 of group 2: the order of calls differs",
    ),
}


@pytest.mark.parametrize(("world", "fault", "ranks", "text"), HANGS.values(), ids=HANGS)
def test_hangs(world: World, fault: Fault, ranks: tuple[int, ...], text: str) -> None:
    hang = found(world)
    assert hang is not None and hang[:2] == (fault, ranks)
    assert not text or hang[2] == text
    assert found(world, at_most=9) is None  # the watch has paused until 9 s ago
    assert found(world, hang_after=13) is None


def test_shapes_differ_where_they_must_be_equal() -> None:
    def world(name: str) -> World:
        other = Collective(6, name, ((8,),), NOW - 12)
        return {
            **{rank: [at(6, 12, c6=name, ranks=(0, 1, 2))] for rank in (0, 1)},
            2: [GroupStatus("0", "0-2", 6, 5, other, (other,))],
        }

    hang = found(world("gloo:all_reduce"))
    assert hang is not None and hang[:2] == (Fault.MISMATCH, (2,)) and "gloo:all_reduce [8]" in hang[2]
    assert found(world("gloo:scatter")) is None


def test_names_that_a_rank_has_made_up_are_escaped_and_cut() -> None:
    world: World = {0: [at(6, 12, "g\n" * 100, (0, 1), c6="x\x1b[2J" * 100)], 1: [at(5, None, "g\n" * 100, (0, 1))]}
    hang = found(world)
    assert hang is not None and hang[2].isprintable() and len(hang[2]) < 700


def test_many_ranks_that_all_wait_for_each_other_take_no_long_time() -> None:
    count = 2000  # more than Python's limit of recursion
    groups = [at(1, 12, str(n), (n, (n + 1) % count)) for n in range(count)]
    world: World = {n: [groups[n], at(0, None, str((n - 1) % count), ((n - 1) % count, n))] for n in range(count)}
    hang = found(world)
    assert hang is not None and hang[0] is Fault.ORDER


def test_the_last_rank_of_a_long_pipeline_is_found() -> None:
    count = 2000
    whole, links = tuple(range(count)), [at(1, 12, str(n), (n, n + 1)) for n in range(count)]
    behind = at(5, None, "all", whole)
    world: World = {n: [behind, links[n]] for n in range(count)}
    world[0] = [at(6, 13, "all", whole)]
    world[count - 1] = [behind, at(0, None, str(count - 2), (count - 2, count - 1))]
    hang = found(world)
    assert hang is not None and hang[:2] == (Fault.MISSING, (count - 1,))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((5,), "5"),
        (range(4096), "0-4095"),
        (range(3, 4096, 8), "3-4091:8"),
        ((2, 1, 7), "1-2,7"),
        ((0, 8, 9, 10), "0,8,9-10"),
        ((0, 8, 16, 17, 18, 40), "0-16:8,17-18,40"),
    ],
)
def test_a_rank_tells_the_members_of_its_groups_as_runs(ranks: Sequence[int], text: str) -> None:
    assert format_ranks(ranks) == text
    assert GroupStatus("0", text, 0, 0).members == tuple(sorted(ranks))


@pytest.mark.parametrize(
    "text", ["-1", "1-", "a", "1-2:0", "0-9999999", "0-99999999", "1,,2", "1 2", ",".join("0" * 5) + ","]
)
def test_members_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_ranks(text)


def test_places() -> None:
    def stacks(rank: int, problem: str = "", *frames: Frame) -> ProcessStacks:
        return ProcessStacks(rank, rank // 2, 70 + rank, "", (ThreadStack("", frames),) if frames else (), problem)

    fetch = Frame("/data.py", 41, "fetch")
    read = Frame("/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 9, "_next_data")
    assert describe_places([2], [stacks(2, "", read, fetch)]) == "rank 2 (host 1, pid 72): is at /data.py:41 in fetch"
    assert describe_places([2], [stacks(2, "busy", read)]).endswith("dataloader.py:9 in _next_data; busy")
    all_stacks = [stacks(3, "stopped (SIGSTOP)"), stacks(1, "", fetch, Frame("/a.py", 1, "<module>")), stacks(0)]
    assert describe_places([1], all_stacks) == "rank 1 (host 0, pid 71): is at /data.py:41 in fetch"
    assert describe_places([3], all_stacks) == "rank 3 (host 1, pid 73): stopped (SIGSTOP)"
    assert describe_places(range(9), [stacks(n, "x") for n in range(9)]).endswith("; 6 more")
    assert describe_places([7], all_stacks) == ""
