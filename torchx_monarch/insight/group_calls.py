# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of ranks, and of the ranks of a host together: who is late, who is waited for, who is quiet."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

MAX_MEMBERS = 1 << 20
"""Most ranks of a process group; a longer text is refused by ``parse_ranks``."""

_RUN = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


def parse_ranks(text: str) -> tuple[range, ...]:
    """Parse the ranks of a process group, as a rank has written them: ``0-4095`` or ``0-56:8,100``.

    Args:
        text: runs of ranks between commas, a run being a rank or the first and the last with their distance, which is 1
            if it is left out; empty for no ranks.

    Raises:
        ValueError: it is something else, or has more than ``MAX_MEMBERS`` ranks.
    """
    runs = []
    for part in text.split(",") if text else ():
        found = _RUN.fullmatch(part)
        if found is None or found[3] is not None and not int(found[3]):
            raise ValueError("no runs of ranks")
        runs.append(range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1)))
    if sum(map(len, runs)) > MAX_MEMBERS:
        raise ValueError(f"more than {MAX_MEMBERS} ranks")
    return tuple(runs)


@functools.lru_cache(maxsize=16)  # all ranks of a group tell the same text
def group_members(text: str) -> tuple[int, ...]:
    """Return the global ranks of a process group, ascending, of which ``parse_ranks`` reads the text."""
    return tuple(sorted(set(itertools.chain.from_iterable(parse_ranks(text)))))


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a rank has called.

    Attributes:
        number: sequence number in its group.
        name: name of the operation, as torch's flight recorder has it, such as ``gloo:all_reduce``.
    """

    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...] = ()
    called: float = 0.0


@dataclasses.dataclass(frozen=True)
class GroupStatus:
    """The collectives of one process group in one rank.

    Attributes:
        name: torch's name of the group: ``0`` for the default group. With the backend, ``0 (nccl)``, if its backends
            have a recorder each.
        ranks: the global ranks of the group, as ``parse_ranks`` reads them. Every rank of a job tells those of its
            groups, so with numbers one by one the samples of a job would grow with the square of its ranks.
        enqueued: sequence number of the last collective that the rank has called; 0 for none.
        completed: that of the last one that has completed in the rank; 0 for none.
        waiting: the oldest collective that has not completed; None if all have.
        recent: the last collectives, oldest first, so that different orders and shapes can be told.
        last_call: when the rank has last called anything in a group of this backend, as far as torch records it.
        calls: when it has called its last collectives, up to number ``enqueued``, oldest first.
    """

    name: str
    ranks: str
    enqueued: int
    completed: int
    waiting: Collective | None = None
    recent: tuple[Collective, ...] = ()
    last_call: float = 0.0
    calls: tuple[float, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Return the global ranks of the group, ascending."""
        return group_members(self.ranks)


@dataclasses.dataclass(frozen=True)
class GroupCalls:
    """What ranks of one host have called in a process group.

    Attributes:
        name, members: ``GroupStatus.name`` and ``ranks``.
        ranks: the global ranks.
        enqueued: sequence number of the last collective that each of them has called; 0 for none.
        waiting: the sequence numbers of the collectives in which some of them wait.
        waited: the seconds for which the first of these has waited in each.
        first: the number of the first of the last collectives that all of them have called; the others follow without a
            gap.
        earliest, latest: when the first and the last of the ranks have called each.
        late: the mean seconds after ``earliest`` at which each of ``ranks`` has called them; empty if there are none.
    """

    name: str
    members: str
    ranks: tuple[int, ...]
    enqueued: tuple[int, ...]
    waiting: tuple[int, ...]
    waited: tuple[float, ...]
    first: int
    earliest: tuple[float, ...]
    latest: tuple[float, ...]
    late: tuple[float, ...]


def group_calls(
    groups_of: Mapping[int, Sequence[GroupStatus]], now: float, count: int = 16, since: float = 0.0
) -> tuple[GroupCalls, ...]:
    """Put together what ranks of a host have called: at most the last ``count`` collectives of a group since a time."""
    alike: dict[tuple[str, str], dict[int, GroupStatus]] = {}
    for rank, groups in groups_of.items():
        for group in groups:
            alike.setdefault((group.name, group.ranks), {})[rank] = group
    found = []
    for (name, members), ranks in alike.items():
        statuses = ranks.values()
        waiting: dict[int, float] = {}
        for group in statuses:
            if (wait := group.waiting) is not None:
                waiting[wait.number] = max(waiting.get(wait.number, 0.0), now - wait.called)
        end = min(group.enqueued for group in statuses) + 1
        first = max(end - count, *(group.enqueued + 1 - len(group.calls) for group in statuses))
        calls = [group.calls[first - group.enqueued - 1 :][: end - first] for group in statuses]
        columns = [times for times in zip(*calls, strict=True) if min(times) >= since] if first < end else []
        earliest, latest = tuple(map(min, columns)), tuple(map(max, columns))
        late = [sum(map(operator.sub, own[-len(columns) :], earliest)) / len(columns) for own in calls if columns]
        found.append(
            GroupCalls(
                name,
                members,
                ranks=tuple(ranks),
                enqueued=tuple(group.enqueued for group in statuses),
                waiting=tuple(waiting),
                waited=tuple(waiting.values()),
                first=end - len(columns),
                earliest=earliest,
                latest=latest,
                late=tuple(late),
            )
        )
    return tuple(found)


def by_group(calls: Iterable[GroupCalls]) -> list[list[GroupCalls]]:
    """Return what ranks have called in each process group of several, by host."""
    found: dict[tuple[str, str], list[GroupCalls]] = {}
    for host in calls:
        found.setdefault((host.name, host.members), []).append(host)
    return [hosts for (_, members), hosts in found.items() if len(group_members(members)) > 1]


@dataclasses.dataclass(frozen=True)
class JointCalls:
    """The last collectives that all ranks of a group have called, and of which their hosts tell.

    Attributes:
        earliest, latest: when the first and the last rank has called each.
        late: the mean seconds after the first rank at which each rank has called them.
    """

    earliest: Sequence[float]
    latest: Sequence[float]
    late: Mapping[int, float]


def joint_calls(hosts: Sequence[GroupCalls]) -> JointCalls | None:
    """Return what the hosts of a group tell together; None if they have no collective in common, or one is missing."""
    first = max(host.first for host in hosts)
    end = min(host.first + len(host.earliest) for host in hosts)
    if first >= end or sum(len(host.ranks) for host in hosts) != len(group_members(hosts[0].members)):
        return None
    earliest = [min(times) for times in zip(*(host.earliest[first - host.first :] for host in hosts), strict=False)]
    latest = [max(times) for times in zip(*(host.latest[first - host.first :] for host in hosts), strict=False)]
    late: dict[int, float] = {}
    for host in hosts:
        after = sum(map(operator.sub, host.earliest[first - host.first :], earliest)) / len(earliest)
        late.update((rank, after + seconds) for rank, seconds in zip(host.ranks, host.late, strict=True))
    return JointCalls(earliest, latest, late)


def lateness(calls: Iterable[GroupCalls]) -> dict[int, float]:
    """Return the seconds after the first rank at which each rank calls collectives, the largest mean of its groups."""
    found: dict[int, float] = {}
    for hosts in by_group(calls):
        joint = joint_calls(hosts)
        for rank, late in joint.late.items() if joint is not None else ():
            found[rank] = max(found.get(rank, 0.0), late)
    return found


def seconds_awaited(calls: Iterable[GroupCalls]) -> dict[int, float]:
    """Return for how long other ranks have waited in a collective for each rank that has not called it."""
    found: dict[int, float] = {}
    for hosts in by_group(calls):
        waits: dict[int, float] = {}
        for host in hosts:
            for number, waited in zip(host.waiting, host.waited, strict=True):
                waits[number] = max(waits.get(number, 0.0), waited)
        last = max(waits, default=0)
        for host in hosts:
            if min(host.enqueued) >= last:  # nearly all
                continue
            for rank, enqueued in zip(host.ranks, host.enqueued, strict=True):
                longest = max((waited for number, waited in waits.items() if number > enqueued), default=0.0)
                if longest:
                    found[rank] = max(found.get(rank, 0.0), longest)
    return found


def seconds_quiet(now: float, since: float, groups: Collection[GroupStatus]) -> float | None:
    """Return the seconds for which a rank has called nothing in its groups, nor done anything else since a time.

    None for one that is in no group with others: nothing is known of what it calls.
    """
    if not any(len(group.members) > 1 for group in groups):
        return None
    return max(0.0, now - max(since, *(group.last_call for group in groups)))
