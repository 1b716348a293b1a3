# SPDX-License-Identifier: BSD-3-Clause
"""Sample the ranks of a host: what their processes use, print and report, and the state of their collectives."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from torchx_monarch.host.ranks import rank_progress
from torchx_monarch.host.ranks.device_use import Devices
from torchx_monarch.host.ranks.flight_recorders import FlightRecorders
from torchx_monarch.host.ranks.rank_process import RankProcess
from torchx_monarch.insight.rank_sample import DeviceUse, GroupStatus, RankSample
from torchx_monarch.system import process_status, processes
from torchx_monarch.system.untrusted_text import one_line

_TIMEOUT = 0.5
"""Seconds for ranks to tell the state of their collectives. Those that answer take some milliseconds."""

_MAX_LINE = 200
"""Characters of a rank's last line."""

_GROUPS_WITH_RECENT = 4
"""Groups of a rank whose last collectives are told: one message has the samples of all ranks of a host."""

_STATES = {
    "D": "uninterruptible",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
    "X": "zombie",
}
"""The states of the kernel that are no ordinary running or sleeping."""


@dataclasses.dataclass(frozen=True)
class SampledRank:
    """What a sample needs to know of a rank.

    Attributes:
        rank: global rank.
        local_rank: rank within the host.
        attempt: number of its attempt.
        started: when its process was started, in seconds since the epoch.
        process: its process.
        directory: folder of its logs; None for none.
    """

    rank: int
    local_rank: int
    attempt: int
    started: float
    process: RankProcess
    directory: Path | None


class RankSampler:
    """Take samples of ranks. Nothing is measured between two calls.

    Args:
        replica: the replica of the host.
        hostname: name of the machine.
        marker: value of the app's marker variable (``processes.MARKER``).
        recorders: reads the flight recorders in the ranks.
    """

    def __init__(self, replica: int, hostname: str, marker: str, recorders: FlightRecorders) -> None:
        self._replica = replica
        self._hostname = hostname
        self._marker = marker
        self._recorders = recorders
        self._devices = Devices()

    async def take(self, ranks: Sequence[SampledRank], groups: bool) -> list[RankSample]:
        """Return a sample of each rank, also of those that have ended.

        Args:
            ranks: the ranks.
            groups: whether they are asked for the state of their collectives.
        """
        running = [rank.process.pid for rank in ranks if not rank.process.ended.is_set()]
        asking = asyncio.ensure_future(self._recorders.status(running if groups else (), _TIMEOUT))
        # In a thread: NVIDIA's driver may take a while, and so may /proc and the disk.
        samples = await asyncio.get_running_loop().run_in_executor(None, self._measure, ranks, running)
        statuses = await asking
        for place, sample in enumerate(samples):
            shortened = tuple(_shortened(number, group) for number, group in enumerate(statuses.get(sample.pid, ())))
            samples[place] = dataclasses.replace(sample, groups=shortened)
        return samples

    def _measure(self, ranks: Sequence[SampledRank], running: Sequence[int]) -> list[RankSample]:
        """Return the samples without the groups; ``running`` has the pids of the ranks that have not ended."""
        children = processes.children()
        families = {pid: [pid, *processes.descendants(pid, self._marker, children)] for pid in running}
        devices = self._devices.use(families)
        now = time.time()
        return [
            self._of(rank, now, families.get(rank.process.pid, []), devices.get(rank.process.pid, ())) for rank in ranks
        ]

    def _of(self, rank: SampledRank, now: float, family: Sequence[int], devices: tuple[DeviceUse, ...]) -> RankSample:
        """Return the sample of a rank without its groups.

        Args:
            rank: the rank.
            now: the time of the sample.
            family: its process and the running processes that it has started; none if it has ended.
            devices: the GPUs that these use.
        """
        process, status = rank.process, process_status.status(rank.process.pid) if family else None
        state = "ended" if status is None else _STATES.get(status.state, "running")
        uses = [use for pid in family if (use := process_status.use(pid)) is not None]
        last = max(process.stdout, process.stderr, key=lambda output: output.last_at)
        return RankSample(
            time=now,
            rank=rank.rank,
            local_rank=rank.local_rank,
            replica=self._replica,
            host=self._hostname,
            pid=process.pid,
            attempt=rank.attempt,
            state=state,
            started=rank.started,
            cpu_seconds=sum(use.cpu_seconds for use in uses),
            rss_bytes=sum(use.rss_bytes for use in uses),
            last_output=last.last_at or None,
            last_line=one_line(last.last_line.decode(errors="replace"))[:_MAX_LINE],
            progress=rank_progress.read(rank.directory),
            devices=devices,
        )


def _shortened(place: int, group: GroupStatus) -> GroupStatus:
    recent = (
        tuple(dataclasses.replace(collective, sizes=()) for collective in group.recent)
        if place < _GROUPS_WITH_RECENT
        else ()
    )
    return dataclasses.replace(group, recent=recent)
