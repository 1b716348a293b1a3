# SPDX-License-Identifier: BSD-3-Clause
"""Find the rank for which others wait in a collective: which has not called it, or has called another one.

A rank that computes, and ranks that all pause, wait in no collective and so are no hang. Names of groups and operations
have been written by the ranks, so they are escaped and cut.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from torchx_monarch.insight.group_calls import Collective, GroupStatus, seconds_quiet
from torchx_monarch.insight.pace import HostPace
from torchx_monarch.insight.stacks import ProcessStacks, rank_ranges
from torchx_monarch.model.codec import Shared
from torchx_monarch.system.error_files import path_in_library
from torchx_monarch.system.untrusted_text import one_line

_MAX_NAME = 80
"""Characters of the name of a group or an operation that are shown."""

_MAX_PLACES = 3
"""Ranks whose stacks' top lines are shown."""

_EQUAL_SHAPES = ("all_reduce", "allreduce", "reduce", "broadcast")
"""Operations for which all ranks must give inputs of the same shapes."""


@dataclasses.dataclass(frozen=True)
class RankCollectives:
    """The process groups of a rank when its host has asked it: empty if it has formed none, None without an answer.

    ``kernel_wait`` is for how many seconds it waits inside the kernel, as far as its host has seen; ``active``, when it
    began, or has last printed something.
    """

    rank: int
    time: float
    groups: tuple[GroupStatus, ...] | None
    kernel_wait: float = 0.0
    active: float = 0.0

    def waited(self, group: GroupStatus) -> float:
        """Return for how many seconds the rank has waited in a collective of a group; 0 if it waits in none."""
        return max(0.0, self.time - group.waiting.called) if group.waiting is not None else 0.0

    @property
    def longest_wait(self) -> float:
        """The seconds for which the rank has waited in a collective; 0 if it waits in none."""
        return max((self.waited(group) for group in self.groups or ()), default=0.0)

    @property
    def quiet(self) -> float:
        """The seconds for which the rank has printed and called nothing; 0 if that is not known."""
        return seconds_quiet(self.time, self.active, self.groups or ()) or 0.0


@dataclasses.dataclass(frozen=True)
class SharedStatus:
    """The status of process groups of ranks of one host, the same but for the groups and the times.

    Attributes:
        ranks: the global ranks.
        names, members: ``GroupStatus.name`` and ``ranks`` of the group of each of them.
        waited: seconds for which each of them has waited in ``status.waiting``.
        status: the rest: its texts are empty and its times 0.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    members: tuple[str, ...]
    waited: tuple[float, ...]
    status: Shared[GroupStatus]


@dataclasses.dataclass(frozen=True)
class HostCollectives:
    """The longest waits of the ranks of a host that run, in seconds; and, with details, their collectives.

    Attributes:
        longest_wait: that in a collective.
        kernel_wait: that inside the kernel.
        quiet: for how many seconds none of them has printed or called anything; None if none runs.
        time: when they were asked, and the rest is known; 0 without details.
        running: the ranks.
        kernel_waits: the seconds for which each of them waits inside the kernel.
        silent: those that have not answered.
        groups: the process groups of those that have.
        pace: what they have done, if that was asked.
    """

    longest_wait: float
    kernel_wait: float = 0.0
    quiet: float | None = None
    time: float = 0.0
    running: tuple[int, ...] = ()
    kernel_waits: tuple[float, ...] = ()
    silent: tuple[int, ...] = ()
    groups: tuple[SharedStatus, ...] = ()
    pace: HostPace = HostPace()

    @classmethod
    def from_ranks(cls, ranks: Sequence[RankCollectives], details: bool) -> HostCollectives:
        found = cls(
            max((rank.longest_wait for rank in ranks), default=0.0),
            max((rank.kernel_wait for rank in ranks), default=0.0),
            min((rank.quiet for rank in ranks), default=None),
        )
        if not details or not ranks:
            return found
        return dataclasses.replace(
            found,
            time=ranks[0].time,
            running=tuple(rank.rank for rank in ranks),
            kernel_waits=tuple(rank.kernel_wait for rank in ranks),
            silent=tuple(rank.rank for rank in ranks if rank.groups is None),
            groups=_shared(ranks),
        )

    def ranks(self) -> list[RankCollectives]:
        """Return the ranks."""
        groups: dict[int, list[GroupStatus]] = {rank: [] for rank in self.running}
        for shared in self.groups:
            status, waiting = shared.status, shared.status.waiting
            each = zip(shared.ranks, shared.names, shared.members, shared.waited, strict=True)
            for rank, name, members, waited in each:
                if waiting is not None:
                    waiting = Collective(waiting.number, waiting.name, waiting.sizes, self.time - waited)
                groups[rank].append(
                    GroupStatus(name, members, status.enqueued, status.completed, waiting, status.recent)
                )
        return [
            RankCollectives(rank, self.time, None if rank in self.silent else tuple(groups[rank]), kernel_wait)
            for rank, kernel_wait in zip(self.running, self.kernel_waits, strict=True)
        ]


def _shared(ranks: Sequence[RankCollectives]) -> tuple[SharedStatus, ...]:
    alike: dict[GroupStatus, list[tuple[int, str, str, float]]] = {}
    for rank in ranks:
        for group in rank.groups or ():
            recent = tuple(dataclasses.replace(collective, called=0.0) for collective in group.recent)
            waiting = group.waiting and dataclasses.replace(group.waiting, called=0.0)
            status = GroupStatus("", "", group.enqueued, group.completed, waiting, recent)
            alike.setdefault(status, []).append((rank.rank, group.name, group.ranks, rank.waited(group)))
    found = []
    for status, each in alike.items():
        numbers, names, members, waited = zip(*each, strict=True)
        found.append(SharedStatus(numbers, names, members, waited, status))
    return tuple(found)


class Fault(enum.Enum):
    """What is wrong with the ranks for which others wait."""

    MISSING = "missing"
    """They have not called the collective, and wait in none."""

    NO_GROUP = "no_group"
    """They have not formed the process group."""

    ENDED = "ended"
    """They have ended."""

    SILENT = "silent"
    """They do not answer: they are stopped, or hold the GIL."""

    MISMATCH = "mismatch"
    """They have called another operation, or the same with inputs of other shapes."""

    ORDER = "order"
    """They wait in other collectives, in a circle."""

    KERNEL = "kernel"
    """They wait inside the kernel, for a disk or a device, and handle no signal, whether or not others wait."""


@dataclasses.dataclass(frozen=True)
class Hang:
    """Ranks that wait in a collective, and those for which they wait; or (KERNEL) ranks that wait inside the kernel.

    Attributes:
        ranks: the ranks for which the others wait, ascending, as ``waiting`` is.
        collective: the collective in which they wait.
        seconds: for how long the first of them has waited.
        called: what ``ranks`` have called or wait in instead; empty if that is not known.
        place: where they are (``describe_places``); empty if that is not known.
    """

    fault: Fault
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    group: str
    collective: Collective
    seconds: float
    called: str = ""
    place: str = ""

    def same_as(self, other: Hang | None) -> bool:
        """Return whether another hang is this one, though more ranks may wait by now, and longer."""
        return other is not None and self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.fault, self.ranks, self.group, self.collective.number

    def describe(self) -> str:
        """Describe the hang in one line: what the ranks have done, in what others wait for them, and where they are."""
        have = "has" if len(self.ranks) == 1 else "have"
        others = f"{rank_ranges(self.waiting)} {'has' if len(self.waiting) == 1 else 'have'} waited"
        number = f"number {self.collective.number} of group {_cut(self.group)}"
        seconds = f"{self.seconds:.0f} s"
        not_called = f"not called {_cut(self.collective.name)}, {number}, in which {others} for {seconds}"
        shown = f"{_cut(self.collective.name)} {_shapes(self.collective)}".rstrip()
        what = {
            Fault.MISSING: f"{have} {not_called}",
            Fault.NO_GROUP: f"{have} not formed the group, and so {not_called}",
            Fault.ENDED: f"{have} ended and {not_called}",
            Fault.SILENT: f"{'does' if len(self.ranks) == 1 else 'do'} not answer, and {have} {not_called}",
            Fault.MISMATCH: f"{have} called {self.called} as {number}, the others {shown}; {others} for {seconds}",
            Fault.ORDER: f"{have} {not_called}; {self.called}: the order of calls differs",
            Fault.KERNEL: f"{have} waited inside the kernel for {seconds}",
        }[self.fault]
        return f"{rank_ranges(self.ranks)} {what}{f'; {self.place}' if self.place else ''}"


def diagnose(
    ranks: Sequence[RankCollectives], hang_after: float, at_most: float = math.inf, kernel_after: float = math.inf
) -> Hang | None:
    """Return the hang that has lasted longest; None if no rank has waited long enough for others.

    Ranks that have waited inside the kernel for ``kernel_after`` seconds come first. A wait counts ``at_most`` as many
    seconds as have passed since a pause of the watch.
    """
    in_kernel = {rank.rank: min(rank.kernel_wait, at_most) for rank in ranks}
    in_kernel = {rank: seconds for rank, seconds in in_kernel.items() if seconds >= kernel_after}
    if in_kernel:
        return Hang(Fault.KERNEL, tuple(sorted(in_kernel)), (), "", Collective(0, ""), max(in_kernel.values()))
    by_rank = _CollectivesByRank((collectives.rank, collectives) for collectives in ranks)
    waits = [
        (min(collectives.waited(group), at_most), -collectives.rank, group, group.waiting)
        for collectives in ranks
        for group in collectives.groups or ()
        if group.waiting is not None
    ]
    waits = sorted((wait for wait in waits if wait[0] >= hang_after), key=lambda wait: wait[:2], reverse=True)
    by_group: dict[str, list[tuple[float, int, GroupStatus, Collective]]] = {}
    for wait in waits:
        by_group.setdefault(wait[2].name, []).append(wait)
    for of_group in by_group.values():
        # Of ranks that wait in several collectives of a group, the first collective is the one that is behind.
        _, _, group, collective = min(of_group, key=lambda wait: wait[3].number)
        if hang := _of_group(by_rank, group, collective, of_group[0][0]):
            return hang
    return None


class _CollectivesByRank(dict[int, RankCollectives]):
    """The ranks by their number. Which of them miss a collective is found once: thousands may wait for the same."""

    def __init__(self, ranks: Iterable[tuple[int, RankCollectives]]) -> None:
        super().__init__(ranks)
        self._missing: dict[tuple[str, str, int], list[int]] = {}

    def missing(self, group: GroupStatus, number: int) -> list[int]:
        """Return the ranks of a group that are not known to have called a collective."""
        key = (group.name, group.ranks, number)
        if key not in self._missing:
            statuses = ((rank, _status(self, rank, group.name)) for rank in group.members)
            self._missing[key] = [rank for rank, status in statuses if status is None or status.enqueued < number]
        return self._missing[key]


def _of_group(by_rank: _CollectivesByRank, group: GroupStatus, collective: Collective, seconds: float) -> Hang | None:
    """Return the hang in a collective; None if all ranks of the group have called it."""

    def hang(fault: Fault, ranks: Collection[int], called: str = "") -> Hang:
        waiting = _waiting(by_rank, group, collective.number)
        return Hang(fault, tuple(sorted(ranks)), waiting, group.name, collective, seconds, called)

    culprits: dict[int, tuple[GroupStatus, Collective]] = {}
    _find_culprits(by_rank, group, collective, culprits, {(group.name, collective.number)})
    if silent := [rank for rank in culprits if rank in by_rank and by_rank[rank].groups is None]:
        return hang(Fault.SILENT, silent)
    if different := _mismatch(by_rank, group, collective.number):
        ranks, called, collective = different
        return hang(Fault.MISMATCH, ranks, called)
    missing = by_rank.missing(group, collective.number)
    if not culprits:
        return hang(Fault.ORDER, missing, _waits_of(by_rank, missing)) if missing else None
    here = sorted(culprits.keys() & set(missing))
    if not here:
        # The ranks that are behind wait for one of another group.
        group, collective = next(iter(culprits.values()))
        here = [rank for rank, (other, _) in culprits.items() if other.name == group.name]
    if ended := [rank for rank in here if rank not in by_rank]:
        return hang(Fault.ENDED, ended)
    if without := [rank for rank in here if _status(by_rank, rank, group.name) is None]:
        return hang(Fault.NO_GROUP, without)
    return hang(Fault.MISSING, here)


def _find_culprits(
    by_rank: _CollectivesByRank,
    group: GroupStatus,
    collective: Collective,
    found: dict[int, tuple[GroupStatus, Collective]],
    seen: set[tuple[str, int]],
) -> None:
    """Find the ranks that keep others waiting and wait for no rank themselves; a circle of ranks has none."""

    def steps(group: GroupStatus, collective: Collective) -> Iterator[tuple[GroupStatus, Collective]]:
        """Yield the collectives in which ranks wait that the collective lacks."""
        for rank in by_rank.missing(group, collective.number):
            owed = [
                (other, other.waiting)
                for other in (by_rank[rank].groups if rank in by_rank else None) or ()
                if other.waiting is not None and by_rank.missing(other, other.waiting.number)
            ]
            if not owed:
                found.setdefault(rank, (group, collective))
            for other, waiting in owed:
                if (step := (other.name, waiting.number)) not in seen:
                    seen.add(step)
                    yield other, waiting

    path = [steps(group, collective)]  # no recursion: each rank of a pipeline may wait for the next
    while path:
        if (step := next(path[-1], None)) is None:
            path.pop()
        else:
            path.append(steps(*step))


def _status(by_rank: _CollectivesByRank, rank: int, name: str) -> GroupStatus | None:
    groups = by_rank[rank].groups if rank in by_rank else None
    return next((group for group in groups or () if group.name == name), None)


def _waiting(by_rank: _CollectivesByRank, group: GroupStatus, number: int) -> tuple[int, ...]:
    statuses = {rank: _status(by_rank, rank, group.name) for rank in group.members}
    return tuple(
        rank for rank, status in statuses.items() if status and status.waiting and status.waiting.number == number
    )


def _waits_of(by_rank: _CollectivesByRank, ranks: Sequence[int]) -> str:
    """Say in which collectives ranks wait: ``rank 1 waits in gloo:all_reduce, number 1 of group 2``."""
    waits = [
        f"rank {rank} waits in {_cut(group.waiting.name)}, number {group.waiting.number} of group {_cut(group.name)}"
        for rank in ranks
        for group in by_rank[rank].groups or ()
        if group.waiting is not None
    ]
    return ", ".join(waits[:_MAX_PLACES])


def _mismatch(by_rank: _CollectivesByRank, group: GroupStatus, number: int) -> tuple[list[int], str, Collective] | None:
    """Return the fewest ranks that have called another collective of this number, theirs, and that of the others."""
    ways: dict[str, list[tuple[int, Collective]]] = {}
    for rank in group.members:
        status = _status(by_rank, rank, group.name)
        called = [] if status is None else [*([status.waiting] if status.waiting else []), *status.recent]
        if (collective := next((recorded for recorded in called if recorded.number == number), None)) is not None:
            shapes = _shapes(collective) if collective.name.rpartition(":")[2] in _EQUAL_SHAPES else ""
            ways.setdefault(f"{_cut(collective.name)} {shapes}".rstrip(), []).append((rank, collective))
    if len(ways) < 2:
        return None
    # Of two ways with as many ranks that of rank 0, or of the lowest rank, counts as the right one.
    right, *wrong = sorted(ways, key=lambda way: (-len(ways[way]), ways[way][0][0]))
    ranks = sorted(rank for way in wrong for rank, _ in ways[way])
    return ranks, " or ".join(wrong[:_MAX_PLACES]), ways[right][0][1]


def _cut(name: str) -> str:
    return one_line(name, _MAX_NAME)


def _shapes(collective: Collective) -> str:
    return ", ".join(f"[{', '.join(map(str, size))}]" for size in collective.sizes)


def _place(process: ProcessStacks) -> str:
    frames = process.threads[0].frames if process.threads else ()
    # A wait inside a library says less than the line that called it; the stacks have both.
    own = [frame for frame in frames if not path_in_library(frame.file)] or frames
    place = f"is at {own[0]}" if own else "is in no Python function" if process.threads else ""
    return "; ".join(filter(None, (place, process.problem)))


def describe_places(ranks: Collection[int], stacks: Iterable[ProcessStacks]) -> str:
    """Say where ranks are, by the lines of the program that their main threads execute; empty if that is not known."""
    places, chosen = [], set(ranks)
    for process in stacks:
        if process.rank in chosen and not process.child:
            places.append(f"rank {process.rank} (host {process.replica}, pid {process.pid}): {_place(process)}")
    shown = sorted(places)[:_MAX_PLACES]
    return one_line("; ".join([*shown, *([f"{len(places) - len(shown)} more"] if len(places) > len(shown) else [])]))
