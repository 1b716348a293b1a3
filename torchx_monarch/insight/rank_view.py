# SPDX-License-Identifier: BSD-3-Clause
"""What ranks do now, from two samples of each: processor time, collectives per second, and which rank is late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torchx_monarch.insight.rank_sample import Collective, DeviceUse, GroupStatus, Progress, RankSample


@dataclasses.dataclass(frozen=True)
class RankView:
    """What a rank does now: values of its last ``RankSample``, and these. None is a value that is not known.

    Attributes:
        cpu: cores that the rank and its children use.
        collectives_per_second: how many collectives the rank calls in a second.
        late_by: seconds after the first rank of the group at which this one has called its last collectives, the mean
            of those that all ranks of the group have called. Clocks of different hosts may differ.
        waited_for: seconds for which other ranks have waited for this one in a collective that it has not called.
        seconds_left: seconds until its last step, at the mean speed of the attempt.
    """

    rank: int
    replica: int
    host: str
    pid: int
    state: str
    cpu: float | None = None
    rss_bytes: int = 0
    devices: tuple[DeviceUse, ...] = ()
    collectives_per_second: float | None = None
    late_by: float | None = None
    waited_for: float | None = None
    last_output: float | None = None
    last_line: str = ""
    progress: Progress | None = None
    seconds_left: float | None = None

    @property
    def gpu_bytes(self) -> int | None:
        """The memory that it has on GPUs; None without one."""
        return sum(device.memory_bytes for device in self.devices) if self.devices else None

    @property
    def gpu_busy(self) -> float | None:
        """The part of the time in which its GPUs compute, the mean of all; None without one."""
        return sum(device.busy for device in self.devices) / len(self.devices) if self.devices else None


def rank_views(samples: Iterable[RankSample], before: Iterable[RankSample] = ()) -> list[RankView]:
    """Return what each rank does, in the order of ranks.

    Args:
        before: earlier samples, of which rates follow.
    """
    ordered = sorted(samples, key=lambda sample: sample.rank)
    present = set(map(_process, ordered))
    past = {_process(sample): sample for sample in before if _process(sample) in present}
    # A rank reads its recorder only now and then: the earlier sample may tell what the present one does not.
    late, awaited = lateness([*past.values(), *ordered]), _awaited(ordered)
    found = []
    for sample in ordered:
        cpu, rate = _rates(sample, past.get(_process(sample)))
        found.append(
            RankView(
                **{name: getattr(sample, name) for name in _OF_SAMPLE},
                cpu=cpu,
                collectives_per_second=rate,
                late_by=late.get(sample.rank),
                waited_for=awaited.get(sample.rank),
                seconds_left=sample.progress.seconds_left(sample.time) if sample.progress is not None else None,
            )
        )
    return found


_OF_SAMPLE = {field.name for field in dataclasses.fields(RankView)} & {
    field.name for field in dataclasses.fields(RankSample)
}


def _process(sample: RankSample) -> tuple[int, int, str, int]:
    return sample.rank, sample.attempt, sample.host, sample.pid


def _rates(sample: RankSample, past: RankSample | None) -> tuple[float | None, float | None]:
    """Return the cores that a rank uses, and its collectives in a second; None for what the samples do not tell."""
    if past is None or sample.time <= past.time or sample.state == "ended":
        return None, None
    seconds = sample.time - past.time
    rate = max(0, sample.collectives - past.collectives) / seconds if sample.groups and past.groups else None
    return max(0.0, sample.cpu_seconds - past.cpu_seconds) / seconds, rate


def _awaited(samples: Iterable[RankSample]) -> dict[int, float]:
    """Return for how long other ranks have waited in a collective for each rank that has not called it."""
    pairs = [(sample, group) for sample in samples for group in sample.groups]
    waits: dict[tuple[str, str], dict[int, float]] = {}
    for sample, group in pairs:
        if group.waiting is not None and group.waiting.called:
            longest = waits.setdefault((group.name, group.ranks), {})
            waited = max(0.0, sample.time - group.waiting.called)
            longest[group.waiting.number] = max(longest.get(group.waiting.number, 0.0), waited)
    found: dict[int, float] = {}
    for sample, group in pairs:  # ranks of a group wait in few different collectives
        for number, waited in waits.get((group.name, group.ranks), {}).items():
            if number > group.enqueued:
                found[sample.rank] = max(found.get(sample.rank, 0.0), waited)
    return found


def lateness(samples: Iterable[RankSample]) -> dict[int, float]:
    """Return the seconds after the first rank at which each rank calls collectives, the largest mean of its groups.

    Only collectives count that all ranks of a group have called, and that their samples tell.
    """
    called: dict[GroupStatus, dict[int, dict[int, Collective]]] = {}
    for sample in samples:
        for group in sample.groups:
            if len(group.members) > 1:
                named = GroupStatus(group.name, group.ranks, 0, 0)
                ranks = called.setdefault(named, {})
                ranks.setdefault(sample.rank, {}).update({collective.number: collective for collective in group.recent})
    found: dict[int, float] = {}
    for named, ranks in called.items():
        if set(ranks) != set(named.members):
            continue
        common = set.intersection(*(set(collectives) for collectives in ranks.values()))
        if not common:
            continue
        first = {number: min(collectives[number].called for collectives in ranks.values()) for number in common}
        for rank, collectives in ranks.items():
            mean = sum(collectives[number].called - first[number] for number in common) / len(common)
            found[rank] = max(found.get(rank, 0.0), mean)
    return found
