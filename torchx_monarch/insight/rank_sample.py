# SPDX-License-Identifier: BSD-3-Clause
"""What a rank does at one moment: its process, its output, its collectives, and the progress that it reports."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

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
def _members(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(itertools.chain.from_iterable(parse_ranks(text)))))


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a rank has called.

    Attributes:
        number: sequence number in its group.
        name: name of the operation, as torch's flight recorder has it, such as ``gloo:all_reduce``.
        sizes: the shapes of the inputs.
        called: when the rank called it, in seconds since the epoch.
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
    """

    name: str
    ranks: str
    enqueued: int
    completed: int
    waiting: Collective | None = None
    recent: tuple[Collective, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Return the global ranks of the group, ascending."""
        return _members(self.ranks)


@dataclasses.dataclass(frozen=True)
class DeviceUse:
    """The use of one GPU by the process of a rank.

    Attributes:
        index: number of the device on its host.
        name: name of its model.
        busy: part of the last second in which it computed, for any process; 0 to 1.
        memory_bytes: memory that the process has there.
        total_bytes: memory of the device.
    """

    index: int
    name: str
    busy: float
    memory_bytes: int
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class Progress:
    """The last call of ``torchx_monarch.progress`` in the program of a rank.

    Attributes:
        step: the step that the program has finished.
        total: the last step; None if the program does not know.
        time: when it was called, in seconds since the epoch.
        checkpoint: the step of the last checkpoint; None for none.
        metrics: further numbers, by name.
        first_step: the step of the first call in this attempt.
        first_time: when that was, in seconds since the epoch.
    """

    step: int
    total: int | None
    time: float
    checkpoint: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    first_step: int = 0
    first_time: float = 0.0

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step, at the mean speed of this attempt; None if that is not known.

        Args:
            now: the time in seconds since the epoch, by the clock of the rank's host.
        """
        done = self.step - self.first_step
        if self.total is None or done <= 0 or self.time <= self.first_time:
            return None
        left = max(0, self.total - self.step) * (self.time - self.first_time) / done
        return max(0.0, left - max(0.0, now - self.time))


@dataclasses.dataclass(frozen=True)
class RankSample:
    """One rank at one moment.

    Attributes:
        time: the moment, in seconds since the epoch, by the clock of its host.
        rank: the global rank.
        local_rank: its number on its host.
        replica: the replica whose host executes it.
        host: name of that machine.
        pid: its process id there.
        attempt: number of its attempt.
        state: ``running``, ``stopped``, ``uninterruptible``, ``zombie`` or ``ended``.
        started: when its process started, in seconds since the epoch.
        cpu_seconds: processor time of the rank and of its running and ended children; 0 once it has ended.
        rss_bytes: resident memory of the rank and of its running children, with what they share; 0 once it has ended.
        last_output: when it last printed something, in seconds since the epoch; None for never.
        last_line: the last line that it printed, escaped and cut.
        groups: its process groups; empty before it has formed one, or without the flight recorder.
        devices: the GPUs on which it has memory; empty where there are none, or nvidia-ml-py is missing.
        progress: the progress that its program has reported; None for none.
    """

    time: float
    rank: int
    local_rank: int
    replica: int
    host: str
    pid: int
    attempt: int
    state: str
    started: float
    cpu_seconds: float
    rss_bytes: int
    last_output: float | None = None
    last_line: str = ""
    groups: tuple[GroupStatus, ...] = ()
    devices: tuple[DeviceUse, ...] = ()
    progress: Progress | None = None

    @property
    def collectives(self) -> int:
        """The number of collectives that the rank has called, in all groups."""
        return sum(group.enqueued for group in self.groups)
