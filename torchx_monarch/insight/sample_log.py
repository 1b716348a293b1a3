# SPDX-License-Identifier: BSD-3-Clause
"""The history of the processor time and memory of ranks: a file of bounded size with one JSON object a line.

Standard library only: replica 0 writes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable

from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.system import safe_files

NAME = "samples.jsonl"
"""Name of the file, in the log folder of replica 0."""

_LIMIT = 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class RankUse:
    """What a rank used at one moment: its processor time in seconds so far, and its memory and GPU memory in bytes."""

    rank: int
    cpu_seconds: float
    rss_bytes: int
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class SampledMoment:
    """The ranks at one moment: the time in seconds since the epoch, and what each rank of an attempt used."""

    time: float
    attempt: int
    ranks: tuple[RankUse, ...]


class SampleLog:
    """Append moments to the file. When it is full, every second moment is dropped, and from then on only every second
    one of those that are offered is kept, and so on. A file that exists is continued.
    """

    def __init__(self, path: str, limit: int = _LIMIT) -> None:
        self._path = path
        self._limit = limit
        self._stride, self._offered = 1, 0

    def append(self, samples: Iterable[RankSample]) -> None:
        """Offer a moment. Ranks that have ended are left out; what cannot be written is lost."""
        ranks = sorted((sample for sample in samples if sample.state != "ended"), key=lambda sample: sample.rank)
        if not ranks:
            return
        self._offered += 1
        if self._offered % self._stride:
            return
        uses = [
            [
                sample.rank,
                round(sample.cpu_seconds, 2),
                sample.rss_bytes,
                sum(device.memory_bytes for device in sample.devices),
            ]
            for sample in ranks
        ]
        line = json.dumps({"time": round(ranks[0].time, 2), "attempt": ranks[0].attempt, "ranks": uses}) + "\n"
        try:
            fd = safe_files.open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(fd, line.encode())
                full = os.fstat(fd).st_size > self._limit
            finally:
                os.close(fd)
            if full:
                self._thin_out()
        except OSError:
            pass

    def _thin_out(self) -> None:
        self._stride *= 2
        with open(safe_files.open_file(self._path), "rb") as file:
            lines = file.read(2 * self._limit).splitlines(keepends=True)
        aside = f"{self._path}.new"
        fd = safe_files.open_file(aside, os.O_WRONLY | os.O_CREAT)
        with open(fd, "wb") as file:
            file.truncate()
            file.writelines(lines[::2] if len(lines) > 1 else [])
        os.replace(aside, self._path)


def read(path: str | os.PathLike[str]) -> list[SampledMoment]:
    """Return the moments in the file, the oldest first; lines that are none are skipped. Without the file, none."""
    try:
        with open(safe_files.open_file(path), "rb") as file:
            lines = file.read(2 * _LIMIT).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = safe_files.parse_json(line)
            uses = tuple(RankUse(*map(_number, rank[:4])) for rank in value["ranks"])  # type: ignore[arg-type]
            found.append(SampledMoment(_number(value["time"]), int(_number(value["attempt"])), uses))
        except (ValueError, TypeError, KeyError):
            continue
    return sorted(found, key=lambda moment: moment.time)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ValueError("not a number of a sample")
    return value
