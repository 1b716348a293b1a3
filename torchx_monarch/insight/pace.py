# SPDX-License-Identifier: BSD-3-Clause
"""Find the ranks that slow a job: one, those of a host, or all of them beside the job's own past.

Ranks tell when they have called their collectives, the steps that they have done, and how long they have waited for a
processor (``HostPace``). What hosts tell at one moment becomes a ``Pace``: for each rank the share of the time in which
others have waited for it, and for it alone. Some of these in a row decide (``find_slow``). No time in milliseconds
decides, and no single wait does, such as for a checkpoint, nor do steps that differ at random.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from torchx_monarch.insight.group_calls import GroupCalls, by_group, joint_calls

_MIN_PACES = 3
"""Paces in a row that must agree on ranks that are slow; more in a job of two or three ranks, of which the same one is
late by chance more often."""

MIN_SECONDS = 9.0
"""The seconds that these paces must cover together."""

_MIN_DISTANCE = 8.0
"""How many times as long as by chance (``_noise``) others must have waited for ranks that are slow. Of ranks whose
steps differ at random each is late in turn, and in a few steps it is late by much."""

_MIN_DISTANCE_OF_SUSPECTS = 4.0
"""The same for ranks that may be slow."""

_LATELY = 8
"""Paces that show whether ranks differ by chance more than before."""

MAX_PACES = 64
"""Paces that are kept, the job's past among them."""

_MIN_SHARE = 0.2
"""Share of the time in which others wait for a rank that is slow, in the median; in each pace at least half of it."""

_HIDDEN = 0.5
"""Share of the time for which a rank that is late waits longer for a processor than others, in which these wait for it
inside of collectives: it has called them, and its threads have no processor to take part."""

_MIN_LOSS = 0.25
"""By which share the steps per second of a job that has become slow are below those of its past."""

_MIN_LOSS_OF_OTHERS = 0.5
"""The same if others wait for a rank mostly inside of collectives, as while it is stopped: then half of ``_MIN_SHARE``
decides who it is."""

WARM_UP = 1
"""Paces at the beginning that do not count, as first steps take longer."""

_MIN_PAST = 3
"""Paces that are a past."""

_MIN_PAST_OF_ALL = 5
"""The same for a verdict on all ranks, of which nothing but the past tells that they are slow."""

_MIN_STEPS = 3
"""Steps, in the median of the ranks, from which a speed is derived."""


# -- what hosts tell ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RankPace:
    """What a rank has done until now.

    Attributes:
        step: the steps that it has done or reported; None if it tells none.
        waited: seconds for which its main thread could run, and had no processor, or its cgroup was throttled.
    """

    rank: int
    step: int | None = None
    waited: float = 0.0


@dataclasses.dataclass(frozen=True)
class HostPace:
    """What the ranks of a host have done until ``time``, by its clock; 0 if it was not asked for that."""

    time: float = 0.0
    ranks: tuple[RankPace, ...] = ()
    groups: tuple[GroupCalls, ...] = ()


# -- paces -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pace:
    """What all ranks have done in the ``seconds`` before ``time``.

    Attributes:
        step: the steps that the rank which is furthest behind had done at the beginning; None if that is not known.
        speed: the steps per second of that rank; None without steps.
        lost: by rank, the share of the time in which others have waited for this one alone, up to 1, as far as that is
            known also inside of collectives; in programs without collectives, by which share its speed is below that of
            the others. Without ranks for which nobody has waited.
        waits: by rank, the share of the time in which its main thread waited for a processor.
    """

    time: float
    seconds: float
    step: int | None
    speed: float | None
    lost: Mapping[int, float]
    waits: Mapping[int, float]


def pace_of(
    past: Mapping[int, RankPace], hosts: Collection[HostPace], now: float, seconds: float, calls: int
) -> Pace | None:
    """Return the pace between two answers of all hosts; None if too little has been done to tell one.

    Args:
        past: the ranks some seconds ago, by their numbers.
        hosts: the hosts now, with times by the clock of replica 0 (``with_clock``).
        calls: how many collectives of a group they tell at most.
    """
    ranks = ranks_of(hosts)
    if not past or past.keys() != ranks.keys():
        return None
    steps = {
        rank: present.step - past[rank].step  # type: ignore[operator]
        for rank, present in ranks.items()
        if present.step is not None and past[rank].step is not None
    }
    enough = len(steps) == len(ranks) and _median_low(steps.values()) >= _MIN_STEPS and min(steps.values()) >= 0
    waits = {rank: (present.waited - past[rank].waited) / seconds for rank, present in ranks.items()}
    lost = _lost_in_groups([group for host in hosts for group in host.groups], seconds, calls)
    if lost is None:
        return None
    others = _others(waits)
    for rank, share in lost.items():
        if share >= _MIN_SHARE / 4:
            lost[rank] = min(1.0, share + _HIDDEN * max(0.0, waits[rank] - others[rank]))
    if not lost and enough and len(steps) > 1:
        others = _others(steps)
        lost = {rank: max(0.0, 1 - done / others[rank]) for rank, done in steps.items()}
    if not lost and not enough:
        return None
    return Pace(
        now,
        seconds,
        min(past[rank].step or 0 for rank in ranks) if len(steps) == len(ranks) else None,
        min(steps.values()) / seconds if enough else None,
        {rank: share for rank, share in lost.items() if share},
        waits,
    )


def ranks_of(hosts: Iterable[HostPace]) -> dict[int, RankPace]:
    return {rank.rank: rank for host in hosts for rank in host.ranks}


def with_clock(host: HostPace, ahead: float) -> HostPace:
    """Return the pace of a host by the clock of replica 0, of which that of the host is some seconds ahead."""
    groups = (
        dataclasses.replace(
            group,
            earliest=tuple(time - ahead for time in group.earliest),
            latest=tuple(time - ahead for time in group.latest),
        )
        for group in host.groups
    )
    return dataclasses.replace(host, groups=tuple(groups))


def _others(values: Mapping[int, float]) -> dict[int, float]:
    """Return for each rank the median of the others; of an even number the lower one: half of them may be slow."""
    ordered = sorted(values.values())
    middle = max(0, len(ordered) - 2) // 2
    below, above = ordered[middle], ordered[min(middle + 1, len(ordered) - 1)]
    return {rank: below if value > below else above for rank, value in values.items()}


def _median_low(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


# The module statistics takes longer to be imported than all others here, and each host would import it at its start.


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _lost_in_groups(calls: Iterable[GroupCalls], seconds: float, count: int) -> dict[int, float] | None:
    """Return ``Pace.lost``; empty if no ranks meet, and None if they have not met often enough to tell.

    The calls of a group must be several, spread over half of the time: before a wait that has not ended others tell
    nothing, and a single one may be long.
    """
    groups = by_group(calls)
    makes_wait, waits = dict[int, float](), dict[int, float]()
    for joint in filter(None, map(joint_calls, groups)):
        spread, is_cut = joint.latest[-1] - joint.earliest[0], len(joint.earliest) >= count // 2
        if (spread < seconds / 2 or len(joint.earliest) < 2) and not is_cut:
            continue
        share = min(1.0, _waited(joint.earliest, joint.latest) / (spread if is_cut else seconds))
        most, others = max(joint.late.values()) or 1.0, _others(joint.late)
        for rank, late in joint.late.items():
            own_share = share * max(0.0, late - others[rank]) / most
            makes_wait[rank] = max(makes_wait.get(rank, 0.0), own_share)
            waits[rank] = max(waits.get(rank, 0.0), share * (1 - late / most))
    # A rank that is late in one group because it has waited in another one is not the reason.
    lost = {rank: max(0.0, share - waits[rank]) for rank, share in makes_wait.items()}
    return lost if lost or not groups else None


def _waited(earliest: Sequence[float], latest: Sequence[float]) -> float:
    """Return for how long the first rank has waited for the last one, in all collectives of a group.

    If a rank has called one before the last rank called the one before it, it had not waited for that one yet: several
    collectives under way together are one wait.
    """
    total = before = last = 0.0
    for early, late in zip(earliest, latest, strict=True):
        spread = late - early
        total += spread if early >= last else max(0.0, spread - before)
        before, last = spread, late
    return total


# -- the decision ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Suspect:
    """Ranks that have been slow since the beginning of a pace; all of them for ``ranks`` without any.

    Attributes:
        share: the share of the time that is lost.
        replica: that of the host whose ranks, several and no others, they are; None for another one.
        speed: the steps per second before, if the job is slower now; 0 if that has not decided.
        paces: how many of the last paces have decided.
    """

    ranks: tuple[int, ...]
    share: float
    since: float
    step: int | None
    replica: int | None = None
    speed: float = 0.0
    paces: int = _MIN_PACES


def find_slow(paces: Sequence[Pace], replica_of: Mapping[int, int]) -> Suspect | None:
    """Return the ranks that are slow; None if none are, or too few paces are known.

    It takes more paces the more ranks are late by chance.

    Args:
        paces: the oldest first.
        replica_of: the replica of each rank.
    """
    paces = paces[WARM_UP:]
    count = least = _count_for_verdict(paces)
    while count < len(paces):  # those before show how late ranks are by chance
        if found := _stand_out(paces, replica_of, count, _MIN_DISTANCE):
            return found
        count *= 2
    return _slower_than_before(paces, replica_of, least)


def find_suspect(paces: Sequence[Pace], replica_of: Mapping[int, int], in_a_row: int) -> Suspect | None:
    """Return the ranks that may be slow, from what some paces in a row have shown, and perhaps no more; else None."""
    paces = paces[WARM_UP:]
    if len(paces) < in_a_row:
        return None
    found = _stand_out(paces, replica_of, in_a_row, _MIN_DISTANCE_OF_SUSPECTS)
    return found or _slower_than_before(paces, replica_of, in_a_row)


def may_become_slow(paces: Sequence[Pace]) -> bool:
    """Return whether others have begun to wait for a rank in the last pace: it may have been slow for a part of it."""
    before = paces[-2].lost if len(paces) > 1 else {}
    late = _late(paces[WARM_UP:], 1, _MIN_DISTANCE_OF_SUSPECTS)
    return any(before.get(rank, 0.0) < _MIN_SHARE / 2 for rank in late)


def _stand_out(paces: Sequence[Pace], replica_of: Mapping[int, int], count: int, distance: float) -> Suspect | None:
    ranks, replica, most = _worst(_late(paces, count, distance), replica_of)
    if most < _MIN_SHARE:
        return None
    first = paces[-count]
    return Suspect(ranks, most, first.time - first.seconds, first.step, replica, paces=count)


def _late(paces: Sequence[Pace], count: int, distance: float) -> dict[int, float]:
    """Return the shares of ranks for which others have waited in nearly all of the last paces, and not by chance.

    Args:
        distance: how many times as long as by chance they must have waited.
    """
    last = paces[-count:]
    shares = {rank: [pace.lost.get(rank, 0.0) for pace in last] for rank in (last[-1].lost if last else ())}
    steady = {rank: own for rank, own in shares.items() if sorted(own)[count // 8] >= _MIN_SHARE / 2}
    seconds = [pace.seconds for pace in last]
    least = distance * math.sqrt(sum(seconds)) * _noise(paces[: len(paces) - count + 1], steady)
    return {rank: median(own) for rank, own in steady.items() if sum(map(operator.mul, own, seconds)) >= least}


def _slower_than_before(paces: Sequence[Pace], replica_of: Mapping[int, int], count: int) -> Suspect | None:
    """Return the ranks that are slow if a job has been slower than before in the last paces, up to all ranks."""
    timed = [(pace.speed, pace) for pace in paces if pace.speed is not None]
    past, present = sorted(speed for speed, _ in timed[:-count]), timed[-count:]
    if len(past) < _MIN_PAST:
        return None
    usual, first = _median_low(past), present[0][1]
    if max(speed for speed, _ in present) >= min(usual * (1 - _MIN_LOSS), past[len(past) // 20]):
        return None
    share, since = 1 - mean(speed for speed, _ in present) / usual, first.time - first.seconds
    last = paces[-count:]
    lost = {rank: median(pace.lost.get(rank, 0.0) for pace in last) for rank in last[-1].lost}
    ranks, replica, most = _worst(lost, replica_of)
    if share >= _MIN_LOSS_OF_OTHERS and most >= _MIN_SHARE / 2 and (len(ranks) == 1 or replica is not None):
        return Suspect(ranks, share, since, first.step, replica, usual, count)
    if most >= share / 2 or len(past) < _MIN_PAST_OF_ALL:
        return None  # ranks of their own may be slow, which more paces tell
    return Suspect((), share, since, first.step, None, usual, count)


def _noise(paces: Sequence[Pace], apart: Container[int]) -> float:
    """Return how much the shares of ranks change by chance from one pace to the next, if paces have a second.

    It is what three of four paces show, or half of the last ones, as a program may have become less even.

    Args:
        apart: ranks that may be slow, which do not count.
    """
    changes = []
    for before, after in itertools.pairwise(paces):
        ranks = (rank for rank in {*before.lost, *after.lost} if rank not in apart)
        change = max((abs(before.lost.get(rank, 0.0) - after.lost.get(rank, 0.0)) for rank in ranks), default=0.0)
        changes.append(change / math.sqrt(1 / before.seconds + 1 / after.seconds))
    if not changes:
        return 0.0
    return max(sorted(changes)[3 * (len(changes) - 1) // 4], _median_low(changes[-_LATELY:]))


def _count_for_verdict(paces: Sequence[Pace]) -> int:
    """Return how many of the last paces a verdict needs; more than there are if these are too few."""
    seconds = 0.0
    for count, pace in enumerate(reversed(paces), 1):
        seconds += pace.seconds
        if count >= max(_MIN_PACES, 7 - len(pace.waits)) and seconds >= MIN_SECONDS:
            return count
    return len(paces) + 1


def _worst(shares: Mapping[int, float], replica_of: Mapping[int, int]) -> tuple[tuple[int, ...], int | None, float]:
    """Return the ranks that lose about the most, the replica of which they are all, and several, and the most."""
    most = max(shares.values(), default=0.0)
    ranks = tuple(sorted(rank for rank, share in shares.items() if share >= most / 2))
    of_host = {replica_of[rank] for rank in ranks}
    alike = [rank for rank, replica in replica_of.items() if replica in of_host]
    is_host = len(of_host) == 1 and len(ranks) == len(alike) > 1
    return ranks, of_host.pop() if is_host else None, most


def share_now(suspect: Suspect, paces: Sequence[Pace]) -> float:
    """Return which share of the time suspects that were found before lose in the last paces; 0 if they are no more."""
    last = paces[-2:]
    if not suspect.speed:
        share = mean(max(pace.lost.get(rank, 0.0) for rank in suspect.ranks) for pace in last)
        return share if share >= _MIN_SHARE / 2 else 0.0
    speeds = [pace.speed for pace in last if pace.speed is not None]
    share = 1 - mean(speeds) / suspect.speed if speeds else suspect.share
    return share if share >= _MIN_LOSS / 2 else 0.0
