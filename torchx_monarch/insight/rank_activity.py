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
    """Return what each rank does, in the order of ranks.

    Args:
        samples: the present samples.
        before: earlier samples of the same ranks, as far as there are any.
    """
    ordered = sorted(samples, key=lambda one: one.rank)
    present = {(one.rank, one.attempt, one.host, one.pid) for one in ordered}
    past_ones = {key: one for one in before if (key := (one.rank, one.attempt, one.host, one.pid)) in present}
    # A rank reads its recorder only now and then: the earlier sample may tell what the present one does not.
    late = lateness([*past_ones.values(), *ordered])
    found = []
    for one in ordered:
        past = past_ones.get((one.rank, one.attempt, one.host, one.pid))
        seconds = one.time - past.time if past is not None else 0.0
        cpu = rate = None
        if past is not None and seconds > 0 and one.state != "ended":
            cpu = max(0.0, one.cpu_seconds - past.cpu_seconds) / seconds
            if one.groups and past.groups:
                rate = max(0, one.collectives - past.collectives) / seconds
        found.append(
            RankActivity(
                rank=one.rank,
                replica=one.replica,
                host=one.host,
                pid=one.pid,
                state=one.state,
                cpu=cpu,
                rss_bytes=one.rss_bytes,
                devices=one.devices,
                collectives_per_second=rate,
                late_by=late.get(one.rank),
                last_output=one.last_output,
                last_line=one.last_line,
                progress=one.progress,
                seconds_left=one.progress.seconds_left(one.time) if one.progress is not None else None,
            )
        )
    return found


def lateness(samples: Iterable[RankSample]) -> dict[int, float]:
    """Return the seconds after the first rank at which each rank calls collectives, the largest mean of its groups.

    Only collectives count that all ranks of a group have called, and that their samples tell.

    Args:
        samples: one or more samples of each rank.
    """
    called: dict[GroupStatus, dict[int, dict[int, Collective]]] = {}
    for one in samples:
        for group in one.groups:
            if len(group.members) > 1:
                named = GroupStatus(group.name, group.ranks, 0, 0)
                ranks = called.setdefault(named, {})
                ranks.setdefault(one.rank, {}).update({each.number: each for each in group.recent})
    found: dict[int, float] = {}
    for named, ranks in called.items():
        if set(ranks) != set(named.members):
            continue
        common = set.intersection(*(set(each) for each in ranks.values()))
        if not common:
            continue
        first = {number: min(each[number].called for each in ranks.values()) for number in common}
        for rank, each in ranks.items():
            mean = sum(each[number].called - first[number] for number in common) / len(common)
            found[rank] = max(found.get(rank, 0.0), mean)
    return found
