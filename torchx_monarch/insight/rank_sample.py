# SPDX-License-Identifier: BSD-3-Clause
"""What a rank does at one moment: its process, its output, and the progress that it reports.

Two samples of each rank tell what the ranks do now (``rank_views``): processor time, collectives per second, lateness.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import zlib
from collections.abc import Iterable, Sequence

from torchx_monarch.insight.group_calls import GroupCalls, GroupStatus, lateness, seconds_awaited, seconds_quiet
from torchx_monarch.insight.metrics import MAX_METRICS, MAX_NAME
from torchx_monarch.insight.step_progress import HEAD, MAX_DIGEST, MAX_STEP
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.job_result import StepsDone
from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line


@dataclasses.dataclass(frozen=True)
class DeviceUse:
    """The use of one GPU by the process of a rank.

    Attributes:
        busy: part of the last second in which it computed, for any process; 0 to 1.
        memory_bytes: memory that the process has there.
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
        checkpoint: the step of the last checkpoint, which was reported at ``checkpoint_time``; 0 for none.
        digest: what the program gives for the comparison of two runs; empty for nothing.
        first_step: the step of the first call in this attempt, at ``first_time``.
    """

    step: int
    total: int | None
    time: float
    checkpoint: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    first_step: int = 0
    first_time: float = 0.0
    digest: str = ""
    checkpoint_time: float = 0.0

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step, at the mean speed of this attempt; None if that is not known."""
        done = self.step - self.first_step
        if self.total is None or done <= 0 or self.time <= self.first_time:
            return None
        left = max(0, self.total - self.step) * (self.time - self.first_time) / done
        return max(0.0, left - max(0.0, now - self.time))


def parse_progress(data: bytes) -> Progress | None:
    """Parse the file in which a rank reports its progress (``step_progress``); None if it holds something else."""
    if len(data) < HEAD.size:
        return None
    size, checksum = HEAD.unpack_from(data)
    text = data[HEAD.size : HEAD.size + size]
    if len(text) != size or binascii.crc32(text) != checksum:
        return None
    try:
        found = decode(Progress, safe_files.parse_json(text.decode()))
    except (DecodeError, ValueError):
        return None
    steps = [step for step in (found.step, found.total, found.checkpoint, found.first_step) if step is not None]
    if not all(0 <= number < MAX_STEP for number in (*steps, found.time, found.first_time, found.checkpoint_time)):
        return None
    names = list(found.metrics)[:MAX_METRICS]
    metrics = {one_line(name[:MAX_NAME]): found.metrics[name] for name in names}
    return dataclasses.replace(found, metrics=metrics, digest=one_line(found.digest[:MAX_DIGEST]))


def steps_done(progress: Progress, started: float, now: float) -> StepsDone:
    """Return the steps of a rank by what it has reported, which it may have made up: times are from its start on."""
    began, ended, saved = (
        min(max(time, started), now) for time in (progress.first_time, progress.time, progress.checkpoint_time)
    )
    known = progress.checkpoint is not None and progress.checkpoint_time > 0
    first, last = min(progress.first_step, progress.step), progress.step
    return StepsDone(first, last, began, max(began, ended), progress.checkpoint, saved if known else None)


@dataclasses.dataclass(frozen=True)
class RankState:
    """What a rank is and does at one moment. None is a value that is not known.

    Attributes:
        replica: the replica whose host, on the machine ``host``, executes it.
        state: ``running``, ``stopped``, ``uninterruptible``, ``zombie`` or ``ended``.
        rss_bytes: resident memory of the rank and of its running children, with what they share; 0 once it has ended.
        last_output: when it last printed something; None for never.
        last_line: the last line that it printed, escaped and cut.
        quiet: the seconds for which it has not printed, reported or called anything; None as in ``seconds_quiet``.
        devices: the GPUs on which it has memory; empty where there are none, or nvidia-ml-py is missing.
    """

    rank: int
    replica: int
    host: str
    pid: int
    state: str
    rss_bytes: int = 0
    last_output: float | None = None
    last_line: str = ""
    quiet: float | None = None
    devices: tuple[DeviceUse, ...] = ()
    progress: Progress | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSample(RankState):
    """One rank at one moment, as its host measures it.

    Attributes:
        time: the moment, by the clock of its host.
        cpu_seconds: processor time of the rank and of its running and ended children; 0 once it has ended.
        collectives: how many it has called, in all groups; None before it has formed one, or without the flight
            recorder.
    """

    time: float
    local_rank: int
    attempt: int
    started: float
    cpu_seconds: float
    collectives: int | None = None

    def with_activity(self, groups: Sequence[GroupStatus], progress: Progress | None) -> RankSample:
        """Return the sample with what the rank has called in its process groups, and the progress that it reports."""
        reported = progress.time if progress is not None else 0.0
        return dataclasses.replace(
            self,
            collectives=sum(group.enqueued for group in groups) if groups else None,
            quiet=seconds_quiet(self.time, max(self.started, self.last_output or 0.0, reported), groups),
            progress=progress,
        )


@dataclasses.dataclass(frozen=True)
class RankSamples:
    """A sample of each rank of a host, or of several hosts, and what the ranks have called in their process groups."""

    ranks: tuple[RankSample, ...] = ()
    calls: tuple[GroupCalls, ...] = ()

    def to_text(self) -> str:
        """Return them as compressed text, a sixth of their JSON, which ``from_text`` reads."""
        return base64.b64encode(zlib.compress(json.dumps(self, default=vars).encode(), 1)).decode()

    @classmethod
    def from_text(cls, text: str) -> RankSamples:
        return decode(cls, json.loads(zlib.decompress(base64.b64decode(text))))


NO_SAMPLES = RankSamples()


def read_samples(answers: Iterable[str]) -> RankSamples:
    """Read the samples of all hosts."""
    found = [*map(RankSamples.from_text, answers)]
    ranks = sorted((rank for samples in found for rank in samples.ranks), key=lambda rank: rank.rank)
    return RankSamples(tuple(ranks), tuple(calls for samples in found for calls in samples.calls))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankView(RankState):
    """What a rank does now, by two samples.

    Attributes:
        cpu: cores that the rank and its children use.
        collectives_per_second: how many collectives the rank calls in a second.
        late_by: seconds after the first rank of the group at which this one has called its last collectives, the mean
            of those that all ranks of the group have called. Clocks of different hosts may differ.
        waited_for: seconds for which other ranks have waited for this one in a collective that it has not called.
        seconds_left: seconds until its last step, at the mean speed of the attempt.
    """

    cpu: float | None = None
    collectives_per_second: float | None = None
    late_by: float | None = None
    waited_for: float | None = None
    seconds_left: float | None = None

    @property
    def gpu_bytes(self) -> int | None:
        """The memory that it has on GPUs; None without one."""
        return sum(device.memory_bytes for device in self.devices) if self.devices else None

    @property
    def gpu_busy(self) -> float | None:
        """The part of the time in which its GPUs compute, the mean of all; None without one."""
        return sum(device.busy for device in self.devices) / len(self.devices) if self.devices else None


@dataclasses.dataclass(frozen=True)
class StepsRead:
    """What the ranks of a host do in their loops of ``training.steps``.

    ``passed`` are the stop points that the furthest rank has passed, ``done`` the steps that it has done, and ``step``
    the number of the last one, if they have numbers. ``is_used``: whether any has begun a loop. ``running`` is the
    number of ranks that run, and ``left`` are those of them that do not wait at the target; once it is confirmed, all:
    how many stop points each has passed, and its number.
    """

    passed: int = 0
    done: int = 0
    step: int | None = None
    is_used: bool = False
    running: int = 0
    left: tuple[tuple[int, int], ...] = ()


def rank_views(samples: RankSamples, before: RankSamples = NO_SAMPLES) -> list[RankView]:
    """Return what each rank does, in the order of ranks.

    Args:
        before: earlier samples, of which rates follow.
    """
    ordered = sorted(samples.ranks, key=lambda sample: sample.rank)
    past = {_process(sample): sample for sample in before.ranks}
    # A rank reads its recorder only now and then: the earlier sample may tell what the present one does not.
    late, awaited = lateness(samples.calls), seconds_awaited(samples.calls)
    late_before = lateness(before.calls) if len(late) < len(ordered) else {}
    found, shared = [], [field.name for field in dataclasses.fields(RankState)]
    for sample in ordered:
        earlier = past.get(_process(sample))
        cpu, rate = _rates(sample, earlier)
        found.append(
            RankView(
                **{name: getattr(sample, name) for name in shared},
                cpu=cpu,
                collectives_per_second=rate,
                late_by=late.get(sample.rank, late_before.get(sample.rank) if earlier is not None else None),
                waited_for=awaited.get(sample.rank),
                seconds_left=sample.progress.seconds_left(sample.time) if sample.progress is not None else None,
            )
        )
    return found


def _process(sample: RankSample) -> tuple[int, int, str, int]:
    return sample.rank, sample.attempt, sample.host, sample.pid


def _rates(sample: RankSample, past: RankSample | None) -> tuple[float | None, float | None]:
    if past is None or sample.time <= past.time or sample.state == "ended":
        return None, None
    seconds = sample.time - past.time
    cpu = max(0.0, sample.cpu_seconds - past.cpu_seconds) / seconds
    if sample.collectives is None or past.collectives is None:
        return cpu, None
    return cpu, max(0, sample.collectives - past.collectives) / seconds
