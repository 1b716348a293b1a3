# SPDX-License-Identifier: BSD-3-Clause
"""Sample the ranks of a host: what their processes use, print and report, and the state of their collectives."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchx_monarch.host.ranks import flight_recorders
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.insight.group_calls import group_calls
from torchx_monarch.insight.rank_sample import DeviceUse, Progress, RankSample, RankSamples, parse_progress
from torchx_monarch.insight.step_progress import NAME, SIZE
from torchx_monarch.system import process_status, processes, safe_files
from torchx_monarch.system.console import WriterThread
from torchx_monarch.system.untrusted_text import one_line

_TIMEOUT = 0.5
"""Seconds for ranks to report the state of their collectives. Those that answer take some milliseconds."""

_MAX_LINE = 200
"""Characters of a rank's last line."""

_STATES = {"D": "uninterruptible", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "zombie"}
"""The states of the kernel that are no ordinary running or sleeping."""


async def take_samples(
    ranks: Sequence[Rank], attempt: int, replica: int, hostname: str, marker: str, disk: WriterThread
) -> RankSamples:
    """Return a sample of each rank, also of those that have ended. Nothing is measured between two calls."""
    running = [rank for rank in ranks if rank.is_running]

    def measure() -> list[RankSample]:
        children = processes.children()
        families = {rank.pid: [rank.pid, *processes.descendants(rank.pid, marker, children)] for rank in running}
        devices = device_use(families)
        return [
            _sample(rank, attempt, replica, hostname, families.get(rank.pid, []), devices.get(rank.pid, ()))
            for rank in ranks
        ]

    asking = asyncio.ensure_future(flight_recorders.status(running, _TIMEOUT))
    reading = asyncio.ensure_future(disk.run(lambda: [read_progress(rank.directory) for rank in ranks]))
    # In a thread: NVIDIA's driver may take a while, and so may /proc.
    samples = await asyncio.to_thread(measure)
    groups_of = await asking
    now = time.time()
    await asyncio.wait([reading], timeout=_TIMEOUT)
    progress = reading.result() if reading.done() else [None] * len(samples)
    reading.cancel()
    groups = {rank.rank: groups_of.get(rank.pid, ()) for rank in ranks}
    reported = zip(samples, progress, strict=True)
    with_activity = tuple(sample.with_activity(groups[sample.rank], progress) for sample, progress in reported)
    return RankSamples(with_activity, group_calls(groups, now))


def _sample(
    rank: Rank, attempt: int, replica: int, hostname: str, family: Sequence[int], devices: tuple[DeviceUse, ...]
) -> RankSample:
    """Return the sample of a rank without its groups; its family is empty if it has ended."""
    status = process_status.status(rank.pid) if family else None
    uses = [use for pid in family if (use := processes.process(pid)) is not None]
    last = max(rank.stdout, rank.stderr, key=lambda output: output.last_at)
    return RankSample(
        time=time.time(),
        rank=rank.rank,
        local_rank=rank.local_rank,
        replica=replica,
        host=hostname,
        pid=rank.pid,
        attempt=attempt,
        state="ended" if status is None else _STATES.get(status.state, "running"),
        started=rank.started,
        cpu_seconds=sum(use.cpu_seconds for use in uses),
        rss_bytes=sum(use.rss_bytes for use in uses),
        last_output=last.last_at or None,
        last_line=one_line(last.last_line.decode(errors="replace"))[:_MAX_LINE],
        devices=devices,
    )


# -- progress that programs report (see ``insight.step_progress``) -----------------------------------------------------


def prepare_progress(directory: Path) -> None:
    """Make the empty file, in the folder of its logs, in which a rank reports its progress; without it, it does not."""
    with contextlib.suppress(OSError):
        (directory / NAME).unlink(missing_ok=True)
        os.close(safe_files.open_file(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def read_progress(directory: Path | None, *, is_end: bool = False) -> Progress | None:
    """Return the progress that a rank has reported; None for none, or for a file that something else has written.

    At the end of the rank the file of one that has reported none is removed.
    """
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        file = safe_files.open_file(directory / NAME)
        try:
            if (found := parse_progress(os.pread(file, SIZE, 0))) is not None:
                return found
        finally:
            os.close(file)
    if is_end:
        with contextlib.suppress(OSError):
            (directory / NAME).unlink(missing_ok=True)
    return None


# -- GPUs --------------------------------------------------------------------------------------------------------------


@functools.cache
def _nvml() -> Any:
    with contextlib.suppress(Exception):  # not installed, or without the driver
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()  # which takes a tenth of a second
        return nvml
    return None


def device_use(families: Mapping[int, Collection[int]]) -> dict[int, tuple[DeviceUse, ...]]:
    """Return the GPUs on which processes have memory. In a container the driver may hide their process ids.

    Empty without nvidia-ml-py or NVIDIA's driver.
    """
    found: dict[int, list[DeviceUse]] = {}
    with contextlib.suppress(Exception):  # of a driver that has been unloaded, or forbids it: ranks run all the same
        nvml = _nvml()
        for index in range(nvml.nvmlDeviceGetCount() if nvml is not None else 0):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            used = {
                process.pid: process.usedGpuMemory or 0 for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)
            }
            owners = {root: [pid for pid in family if pid in used] for root, family in families.items()}
            if not any(owners.values()):
                continue
            name = nvml.nvmlDeviceGetName(device)
            shown = one_line(name if isinstance(name, str) else name.decode(errors="replace"), 100)
            busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
            total = nvml.nvmlDeviceGetMemoryInfo(device).total
            for root, pids in owners.items():
                if pids:
                    memory = sum(used[pid] for pid in pids)
                    found.setdefault(root, []).append(DeviceUse(index, shown, busy, memory, total))
    return {root: tuple(devices) for root, devices in found.items()}
