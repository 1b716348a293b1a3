# SPDX-License-Identifier: BSD-3-Clause
"""What ranks do now, from two samples of each: processor time, collectives per second, and which rank is late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torchx_monarch.insight.rank_sample import Collective, DeviceUse, GroupStatus, Progress, RankSample


@dataclasses.dataclass(frozen=True)
class RankActivity:
    """What a rank does now. None is a value that is not known.

    Attributes:
        rank: the global rank.
        replica: the replica whose host executes it.
        host: name of that machine.
        pid: its process id there.
        state: ``running``, ``stopped``, ``uninterruptible``, ``zombie`` or ``ended``.
        cpu: cores that the rank and its children use.
        rss_bytes: their resident memory, with what they share.
        devices: the GPUs on which they have memory.
        collectives_per_second: how many collectives the rank calls in a second.
        late_by: seconds after the first rank of the group at which this one has called its last collectives, the mean
            of those that all ranks of the group have called. Clocks of different hosts may differ.
        last_output: when it last printed something, in seconds since the epoch.
        last_line: the last line that it printed, escaped and cut.
        progress: the progress that its program has reported.
        seconds_left: seconds until its last step, at the mean speed of the attempt.
    """

    rank: int
    replica: int
    host: str
    pid: int
    state: str
    cpu: float | None
    rss_bytes: int
    devices: tuple[DeviceUse, ...]
    collectives_per_second: float | None
    late_by: float | None
    last_output: float | None
    last_line: str
    progress: Progress | None
    seconds_left: float | None


def activity(samples: Iterable[RankSample], before: Iterable[RankSample]) -> list[RankActivity]:
    """Return what each rank does, in the order of ranks."""
    ordered = sorted(samples, key=lambda sample: sample.rank)
    present = {(sample.rank, sample.attempt, sample.host, sample.pid) for sample in ordered}
    past_ones = {
        key: sample for sample in before if (key := (sample.rank, sample.attempt, sample.host, sample.pid)) in present
    }
    # A rank reads its recorder only now and then: the earlier sample may tell what the present one does not.
    late = lateness([*past_ones.values(), *ordered])
    found = []
    for sample in ordered:
        past = past_ones.get((sample.rank, sample.attempt, sample.host, sample.pid))
        seconds = sample.time - past.time if past is not None else 0.0
        cpu = rate = None
        if past is not None and seconds > 0 and sample.state != "ended":
            cpu = max(0.0, sample.cpu_seconds - past.cpu_seconds) / seconds
            if sample.groups and past.groups:
                rate = max(0, sample.collectives - past.collectives) / seconds
        found.append(
            RankActivity(
                rank=sample.rank,
                replica=sample.replica,
                host=sample.host,
                pid=sample.pid,
                state=sample.state,
                cpu=cpu,
                rss_bytes=sample.rss_bytes,
                devices=sample.devices,
                collectives_per_second=rate,
                late_by=late.get(sample.rank),
                last_output=sample.last_output,
                last_line=sample.last_line,
                progress=sample.progress,
                seconds_left=sample.progress.seconds_left(sample.time) if sample.progress is not None else None,
            )
        )
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
