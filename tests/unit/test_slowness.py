# SPDX-License-Identifier: BSD-3-Clause
"""Who slows a job, from the times at which its ranks call collectives, their steps, and where they are."""

from __future__ import annotations

import builtins
import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from torchx_monarch.host.ranks.rank_recorder import format_ranks
from torchx_monarch.insight import pace as pace_module
from torchx_monarch.insight.group_calls import GroupStatus, group_calls
from torchx_monarch.insight.pace import (
    HostPace,
    Pace,
    RankPace,
    Suspect,
    find_slow,
    may_become_slow,
    pace_of,
    ranks_of,
    share_now,
    with_clock,
)
from torchx_monarch.insight.slowness import Kind, Slowness, activity, explain
from torchx_monarch.insight.stacks import Frame, KernelWait, ProcessStacks, ThreadStack
from torchx_monarch.model.codec import decode

WORLD = 8
PER_HOST = 2
EVERY = 6.0

Work = Callable[[int, int, float], float]
"""The seconds that a rank (first) works in a step (second) that begins at a time."""


class Program:
    """Ranks that work, and meet in collectives; ``groups`` are met one after the other in each step.

    Args:
        buckets: how many collectives of the last group are under way together.
    """

    def __init__(
        self, work: Work, groups: Sequence[Sequence[Sequence[int]]] = ((range(WORLD),),), buckets: int = 1
    ) -> None:
        self.work, self.groups, self.buckets = work, groups, buckets
        self.world = 1 + max(rank for met in groups for group in met for rank in group)
        self.now = dict.fromkeys(range(self.world), 1000.0)
        self.step = 0
        self.calls: dict[tuple[int, ...], dict[int, list[float]]] = {}

    def run_until(self, time: float) -> None:
        while max(self.now.values()) < time:
            for rank in self.now:
                self.now[rank] += self.work(rank, self.step, self.now[rank])
            for number, met in enumerate(self.groups):
                for group in map(tuple, met):
                    for _ in range(self.buckets if number == len(self.groups) - 1 else 1):
                        calls = self.calls.setdefault(group, {rank: [] for rank in group})
                        for rank in group:
                            calls[rank].append(self.now[rank])
                            self.now[rank] += 1e-4
                    met_at = max(self.now[rank] for rank in group)
                    self.now.update(dict.fromkeys(group, met_at))
            self.step += 1

    def answers(self, time: float, seconds: float, *, has_steps: bool = True) -> dict[int, HostPace]:
        """The answers of the hosts, as replica 0 gets them."""
        self.run_until(time)
        hosts = {}
        for replica in range(self.world // PER_HOST):
            ranks = range(replica * PER_HOST, (replica + 1) * PER_HOST)
            groups = dict[int, list[GroupStatus]]()
            for rank in ranks:
                for at, (group, calls) in enumerate(self.calls.items()):
                    done = [call for call in calls.get(rank, ()) if call <= time]
                    if rank in group:
                        status = GroupStatus(str(at), format_ranks(group), len(done), 0, calls=tuple(done[-256:]))
                        groups.setdefault(rank, []).append(status)
            own = tuple(RankPace(rank, self.step if has_steps else None) for rank in ranks)
            pace = HostPace(time, own, group_calls(groups, time, 256, time - seconds))
            hosts[replica] = decode(HostPace, json.loads(json.dumps(pace, default=vars)))
        return hosts

    def paces(self, count: int, *, has_steps: bool = True) -> list[Pace]:
        asked = time = max(self.now.values())
        before, found = self.answers(time, EVERY, has_steps=has_steps), []
        for _ in range(count):
            time += EVERY
            after = self.answers(time, time - asked, has_steps=has_steps)
            if (pace := pace_of(ranks_of(before.values()), after.values(), time, time - asked, 256)) is not None:
                found.append(pace)
                before, asked = after, time
        return found


REPLICA_OF = {rank: rank // PER_HOST for rank in range(WORLD)}


def noisy(slow: Mapping[int, float] | None = None, since: float = 0.0) -> Work:
    """Work of 0.1 s with noise, longer by a factor in some ranks."""
    noise = random.Random(7)

    def work(rank: int, step: int, now: float) -> float:
        seconds = 0.1 * noise.uniform(0.9, 1.1) * (3 if noise.random() < 0.01 else 1)
        return seconds * (slow or {}).get(rank, 1.0) if now >= 1000 + since else seconds

    return work


def found(program: Program, count: int = 5, *, has_steps: bool = True) -> Suspect | None:
    return find_slow(program.paces(count, has_steps=has_steps), REPLICA_OF)


TENSOR_PARALLEL = [[0, 1], [2, 3], [4, 5], [6, 7]]
DATA_PARALLEL = [[0, 2, 4, 6], [1, 3, 5, 7]]
PROGRAMS = {
    "one group": {},
    "buckets": {"buckets": 5},
    "two groups": {"groups": [TENSOR_PARALLEL, DATA_PARALLEL]},
    "a group that is met twice": {"groups": [[range(WORLD)], TENSOR_PARALLEL, [range(WORLD)]]},
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("has_steps", [True, False])
def test_a_slow_rank_is_found_whatever_groups_ranks_meet_in(program: dict[str, object], has_steps: bool) -> None:
    assert found(Program(noisy(), **program), has_steps=has_steps) is None  # type: ignore[arg-type]
    suspect = found(Program(noisy({5: 1.5}), **program), has_steps=has_steps)  # type: ignore[arg-type]
    assert suspect is not None and suspect.ranks == (5,) and suspect.replica is None
    assert 0.25 < suspect.share < 0.40  # 0.05 of 0.15 s
    assert (suspect.step is not None) == has_steps


def test_slow_ranks_of_one_host_are_that_host_and_others_are_ranks() -> None:
    host = found(Program(noisy({4: 1.6, 5: 1.6})))
    assert host is not None and (host.ranks, host.replica) == ((4, 5), 2)
    ranks = found(Program(noisy({1: 1.6, 4: 1.6})))
    assert ranks is not None and (ranks.ranks, ranks.replica) == ((1, 4), None)


def test_slowness_counts_from_its_beginning_and_is_gone_after_its_end() -> None:
    program = Program(noisy({3: 2.0}, since=2 * EVERY))
    paces = program.paces(2)  # the first one is not counted
    assert find_slow(paces, REPLICA_OF) is None
    paces += program.paces(2)
    assert find_slow(paces, REPLICA_OF) is None  # too few
    paces += program.paces(1)
    short = [dataclasses.replace(pace, seconds=2.0) for pace in paces]
    assert find_slow(short, REPLICA_OF) is None  # not long enough
    suspect = find_slow(paces, REPLICA_OF)
    assert suspect is not None and suspect.step is not None and abs(suspect.since - 1000 - 2 * EVERY) <= EVERY / 2
    assert share_now(suspect, paces) > 0.4
    program.work = noisy()
    assert not share_now(suspect, paces + program.paces(3))


def test_one_long_wait_such_as_for_a_checkpoint_is_no_slowness() -> None:
    def work(rank: int, step: int, now: float) -> float:
        return 13.0 if rank == 0 and step == 100 else 0.1

    program = Program(work)
    paces = program.paces(2)
    for _ in range(8):
        paces += program.paces(1)
        assert find_slow(paces, REPLICA_OF) is None


def test_one_long_wait_between_short_ones_is_no_slowness() -> None:
    waits = [0.12, 0.12, 0.8, 0.12, 0.15, 0.12, 0.8, 0.1]
    paces = [pace({0: lost, 1: 0.0}) for lost in waits]
    assert all(find_slow(paces[:count], REPLICA_OF) is None for count in range(len(paces) + 1))


def uneven(
    seconds: float, unevenness: float, seed: int, slow: Mapping[int, float] | None = None, since: float = 0.0
) -> Work:
    """Work whose seconds differ at random in each rank and step; some ranks are slow, or all become uneven, later."""
    noise = random.Random(seed)

    def work(rank: int, step: int, now: float) -> float:
        later = now >= 1000 + since
        differs = noise.lognormvariate(0.0, unevenness if later or slow else 0.02)
        return seconds * differs * ((slow or {}).get(rank, 1.0) if later else 1.0)

    return work


def verdicts(paces: Sequence[Pace]) -> set[tuple[int, ...]]:
    """Return the ranks of all verdicts in the time of some paces."""
    found = (find_slow(paces[:count], REPLICA_OF) for count in range(len(paces) + 1))
    return {suspect.ranks for suspect in found if suspect is not None}


@pytest.mark.parametrize("seconds", [0.5, 2.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_steps_that_differ_at_random_are_no_slowness(ranks: int, seconds: float) -> None:
    for seed in range(3):
        paces = Program(uneven(seconds, 0.3, seed), [[range(ranks)]]).paces(60)
        assert len(paces) > 15 and not verdicts(paces)
        sooner = [may_become_slow(paces[:count]) for count in range(5, len(paces))]
        assert sum(sooner) < len(sooner) / 5  # nor are hosts asked more often


def test_a_program_may_become_uneven() -> None:
    for seed in range(8):
        paces = Program(uneven(0.5, 0.4, seed, since=40 * EVERY), [[range(4)]]).paces(60)
        assert verdicts(paces) <= {()}  # which is right: steps end later, as the last rank does


def test_a_slow_rank_among_uneven_ones_is_found_with_time() -> None:
    for seed in range(4):
        paces = Program(uneven(0.5, 0.4, seed, {2: 1.6}, since=8 * EVERY), [[range(4)]]).paces(60)
        assert not verdicts(paces[:9]) and verdicts(paces) == {(2,)}
    slow = uneven(0.5, 0.5, 4, {1: 2.5}, since=30 * EVERY)
    assert verdicts(Program(slow, [[range(4)]]).paces(60)) == {(1,)}  # and not all of them before


def test_a_single_collective_tells_nothing() -> None:
    program = Program(lambda rank, step, now: 10.0 if rank else 5.0)
    before, after = program.answers(1001.0, 1.0), program.answers(1011.0, 6.0)
    assert pace_of(ranks_of(before.values()), after.values(), 1011.0, 6.0, 256) is None


def test_steps_may_be_long_and_collectives_many() -> None:
    def work(rank: int, step: int, now: float) -> float:
        return (8.0 if rank == 5 else 4.0) if step % 10 == 0 else 0.0

    groups = [[range(WORLD)]] * 10  # one rank is late in the first of ten collectives that follow each other
    suspect = found(Program(work, groups), 20)
    assert suspect is not None and suspect.ranks == (5,) and suspect.share > 0.3
    many = found(Program(lambda rank, step, now: 0.02 if rank == 5 and not step % 10 else 0.001), 5)
    assert many is not None and many.ranks == (5,) and many.share > 0.5


def test_all_ranks_are_slow_beside_their_own_past() -> None:
    program = Program(noisy(dict.fromkeys(range(WORLD), 1.6), since=10 * EVERY))
    paces = program.paces(10)
    assert find_slow(paces, REPLICA_OF) is None
    paces += program.paces(4)
    paces.append(dataclasses.replace(paces[-1], speed=None))  # of too few steps
    suspect = find_slow(paces, REPLICA_OF)
    assert suspect is not None and suspect.ranks == () and 0.3 < suspect.share < 0.45
    assert share_now(suspect, paces)
    program.work = noisy()
    assert not share_now(suspect, paces + program.paces(3))


def test_a_rank_for_which_others_wait_inside_of_collectives_is_found_as_the_job_is_slower_than_before() -> None:
    def paces(speed: float, *lost: Mapping[int, float]) -> list[Pace]:
        return [dataclasses.replace(pace(shares), speed=speed) for shares in lost]

    past = paces(10.0, *[{0: 0.0, 1: 0.02, 5: 0.04}] * 4)  # the first one is not counted
    stopped = paces(4.0, {0: 0.0, 1: 0.0, 5: 0.3}, {0: 0.03, 1: 0.0, 5: 0.0}, *[{0: 0.0, 1: 0.0, 5: 0.15}] * 2)
    suspect = find_slow(past + stopped, {0: 0, 1: 0, 5: 1})
    assert suspect is not None and (suspect.ranks, suspect.share) == ((5,), 0.6)
    assert share_now(suspect, past + stopped) == pytest.approx(0.6) and not share_now(suspect, past)
    alike = paces(4.0, *[{0: 0.15, 1: 0.0, 5: 0.15}] * 4)
    assert find_slow(past + alike, {0: 0, 1: 0, 5: 1}) is None  # nor is there enough of a past for all ranks
    host = paces(4.0, *[{0: 0.0, 4: 0.12, 5: 0.15}] * 4)
    found = find_slow(past + host, {0: 0, 4: 1, 5: 1})
    assert found is not None and (found.ranks, found.replica) == ((4, 5), 1)


def test_programs_without_collectives_are_compared_by_their_steps_and_without_steps_nothing_is_said() -> None:
    def answers(steps: Sequence[int | None], time: float) -> dict[int, HostPace]:
        return {0: HostPace(time, tuple(RankPace(rank, step) for rank, step in enumerate(steps)))}

    counts = [[10 * at * (3 if rank == 2 else 5) for rank in range(4)] for at in range(6)]
    looks = [answers(steps, EVERY * at) for at, steps in enumerate(counts, 1)]
    paces = [
        pace_of(ranks_of(before.values()), after.values(), 0, EVERY, 256)
        for before, after in zip(looks, looks[1:], strict=False)
    ]
    suspect = find_slow([pace for pace in paces if pace is not None], dict.fromkeys(range(4), 0))
    assert suspect is not None and suspect.ranks == (2,) and abs(suspect.share - 0.4) < 0.01
    nothing = answers([None] * 4, 1.0)
    assert pace_of(ranks_of(nothing.values()), nothing.values(), 0, EVERY, 256) is None
    before = ranks_of(looks[0].values())
    assert pace_of(before, looks[0].values(), 0, EVERY, 256) is None  # no steps: a pause
    assert pace_of(before, [HostPace(7.0, (RankPace(0, 1),))], 0, EVERY, 256) is None  # ranks have ended


def test_a_clock_that_differs_makes_no_rank_slow() -> None:
    program = Program(noisy())
    time = 1000.0
    before, paces = program.answers(time, EVERY), []
    for _ in range(4):
        time += EVERY
        after = program.answers(time, EVERY)
        ahead = {**after, 1: with_clock(after[1], -30.0)}
        pace = pace_of(ranks_of(before.values()), {**ahead, 1: with_clock(ahead[1], 30.0)}.values(), time, EVERY, 256)
        assert pace is not None
        paces.append(pace)
        before = after
    assert find_slow(paces, REPLICA_OF) is None


LIBRARY = "/env/lib/python3.11/site-packages"
PROGRAM = Frame("/home/me/train.py", 30, "main")
LOADER = Frame(f"{LIBRARY}/torch/utils/data/dataloader.py", 700, "__next__")
ALL_REDUCE = Frame(f"{LIBRARY}/torch/distributed/distributed_c10d.py", 2000, "all_reduce")
BACKWARD = Frame(f"{LIBRARY}/torch/autograd/graph.py", 800, "_engine_run_backward")
DATA = Frame("/home/me/data.py", 41, "__getitem__")
ACTIVITIES: dict[str, tuple[tuple[Frame, ...], KernelWait, Kind, str, str]] = {
    "sleep in a dataset": ((DATA, LOADER, PROGRAM), KernelWait("S"), Kind.INPUT, "data.py:41", ""),
    "own input": ((Frame("/p/train.py", 9, "next_batch"), PROGRAM), KernelWait("R"), Kind.INPUT, "train.py:9", ""),
    "file": ((DATA, LOADER), KernelWait("D", "read", "/mnt/slow/x"), Kind.FILE, "data.py:41", "/mnt/slow/x"),
    "reads blocks": ((DATA, LOADER), KernelWait("D", "preadv", "/mnt/slow/x"), Kind.FILE, "data.py:41", "/mnt/slow/x"),
    "opens a file": ((PROGRAM,), KernelWait("D", "openat", "/mnt/slow/x"), Kind.FILE, "train.py:30", "/mnt/slow/x"),
    "lock of a file": ((PROGRAM,), KernelWait("S", "flock", "/tmp/l"), Kind.LOCK, "train.py:30", "/tmp/l"),
    "lock": ((DATA, LOADER), KernelWait("S", "futex"), Kind.LOCK, "data.py:41", ""),
    "server": ((DATA, LOADER), KernelWait("S", "recvfrom", "socket:[77]"), Kind.NETWORK, "data.py:41", ""),
    "stopped": ((PROGRAM,), KernelWait("T"), Kind.PROCESSOR, "stopped by a signal", ""),
    "computes": ((PROGRAM,), KernelWait("R"), Kind.PROGRAM, "train.py:30", ""),
    "computes in torch": ((BACKWARD, PROGRAM), KernelWait("R"), Kind.PROGRAM, "train.py:30", ""),
    "later than others": ((BACKWARD, PROGRAM), KernelWait("S", "futex"), Kind.NETWORK, "train.py:30", ""),
    "in a collective": ((ALL_REDUCE, PROGRAM), KernelWait("S", "futex"), Kind.NETWORK, "train.py:30", ""),
}
HOSTS = {0: (0, "node6"), 1: (0, "node6"), 5: (1, "node7")}


def stacks(rank: int, frames: Sequence[Frame], wait: KernelWait, child: str = "") -> ProcessStacks:
    return ProcessStacks(rank, 0, 1, child, (ThreadStack("", tuple(frames)),), wait=wait)


def pace(lost: Mapping[int, float], waits: Mapping[int, float] | None = None) -> Pace:
    return Pace(2000.0, EVERY, 4100, 10.0, lost, waits or dict.fromkeys(lost, 0.05))


SUSPECT = Suspect((5,), 0.275, 1000.0, 4100)


def verdict(
    *own: Sequence[ProcessStacks], theirs: Sequence[ProcessStacks] = (), suspect: Suspect = SUSPECT, waits: float = 0.05
) -> Slowness:
    paces = [pace({0: 0.0, 1: 0.0, 5: 0.3}, {0: 0.05, 1: 0.05, 5: waits})] * 3
    return explain(suspect, paces, [*map(activity, own)], [activity([process]) for process in theirs], HOSTS)


@pytest.mark.parametrize("activity", ACTIVITIES.values(), ids=ACTIVITIES)
def test_in_what_a_rank_loses_its_time(activity: tuple[tuple[Frame, ...], KernelWait, Kind, str, str]) -> None:
    frames, wait, kind, place, path = activity
    # Others wait while it does what all have to do, and do that while it does what is its own.
    waiting, working = stacks(0, (BACKWARD,), KernelWait("S", "futex")), stacks(0, (PROGRAM,), KernelWait("S"))
    mine, common = stacks(5, frames, wait), stacks(5, (PROGRAM,), KernelWait("S"))
    found = verdict(*[[mine], [common]] * 4, theirs=[working, waiting] * 4)
    assert (found.kind, found.place.rpartition("/")[2], found.path) == (kind, place, path)
    assert (found.host, found.replica, found.whole_host) == ("node7", 1, False)


def test_workers_of_a_loader_tell_more_than_the_rank_that_waits_for_them() -> None:
    own = stacks(5, (LOADER, PROGRAM), KernelWait("S"))
    worker = stacks(5, (DATA,), KernelWait("D", "read", "/mnt/slow/x"), "python3")
    found = verdict([own, worker])
    assert (found.kind, found.path) == (Kind.FILE, "/mnt/slow/x")


def test_a_rank_that_could_run_and_has_no_processor_is_said_so() -> None:
    assert verdict([stacks(5, (PROGRAM,), KernelWait("R"))], waits=0.35).kind is Kind.PROCESSOR


def test_a_rank_without_a_processor_makes_others_wait_inside_of_collectives_too() -> None:
    def work(rank: int, step: int, now: float) -> float:
        return 0.115 if rank == 5 else 0.1

    program, paces = Program(work), []
    time = 1000.0
    before = program.answers(time, EVERY)
    for _ in range(5):
        time += EVERY
        after = program.answers(time, EVERY)
        waited = {rank: (0.5 if rank == 5 else 0.1) * (time - 1000.0) for rank in range(WORLD)}
        after = {
            replica: dataclasses.replace(
                host, ranks=tuple(dataclasses.replace(rank, waited=waited[rank.rank]) for rank in host.ranks)
            )
            for replica, host in after.items()
        }
        found = pace_of(ranks_of(before.values()), after.values(), time, EVERY, 256)
        assert found is not None
        paces.append(found)
        before = after
    suspect = find_slow(paces, REPLICA_OF)
    assert suspect is not None and suspect.ranks == (5,) and suspect.share > 0.25
    assert explain(suspect, paces, [], [], {rank: (0, "n") for rank in range(WORLD)}).kind is Kind.PROCESSOR


def test_what_a_look_takes_does_not_grow_with_the_square_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def sorts(ranks: int) -> int:
        sizes: list[int] = []

        def counting(values: Iterable[float]) -> list[float]:
            ordered = builtins.sorted(values)
            sizes.append(len(ordered))
            return ordered

        monkeypatch.setattr(pace_module, "sorted", counting, raising=False)
        groups = {
            rank: [GroupStatus("0", f"0-{ranks - 1}", 16, 16, calls=tuple(step + rank / 1e4 for step in range(16)))]
            for rank in range(ranks)
        }
        own = tuple(RankPace(rank, 0) for rank in range(ranks))
        host = HostPace(16.0, own, group_calls(groups, 16.0))
        assert pace_of(ranks_of([host]), [host], 16.0, 16.0, 16) is not None
        return sum(sizes)

    assert sorts(400) <= 10 * sorts(40)


def test_the_verdict_as_a_line() -> None:
    found = verdict([stacks(5, (DATA, LOADER), KernelWait("S"))])
    line = "slow since step 4,100: rank 5 (node7), 38 % behind the others, in its input: data.py:41; "
    assert found.shown(1000 + 2400).message == f"{line}11 min 0 s lost so far" and found.shown(3400).lost == 660.0
    host = Slowness(Kind.FILE, (4, 5), "node7", 2, True, 1.0, 0.5, 1000.0, 7, "/a/data.py:4", "/mnt/\x1b[31m")
    message = host.shown(1010).message
    assert message.startswith("slow since step 7: host node7 (ranks 4-5), 100 % behind the others, blocked on a file: ")
    assert "\x1b" not in message
    every = Slowness(Kind.INPUT, (), "", None, False, 0.5, 1 / 3, 1000.0).shown(1030).message
    assert "all ranks, 50 % slower than before, in their input; 10.0 s lost so far" in every
