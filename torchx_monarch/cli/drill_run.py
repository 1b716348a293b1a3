# SPDX-License-Identifier: BSD-3-Clause
"""One run of a drill: observe the steps of a job and the files of its folder, and let one thing fail meanwhile.

If all ranks report their last checkpoint (``progress(checkpoint=…)``, ``checkpoint(…)``), that tells when a program
saves; else its files do. Those that it has written below its folder count as checkpoints if they have at least half the
size of the largest one of the undisturbed run, so that logs do not. A save has ended when such a file has changed and
then stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchx.specs import parse_app_handle

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.state import count_restarts
from torchx_monarch.backends.local.supervision import SupervisorRecord
from torchx_monarch.insight.rank_sample import Progress, parse_progress
from torchx_monarch.insight.step_progress import NAME, SIZE
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.job_status import timeline_of
from torchx_monarch.system import processes, safe_files
from torchx_monarch.system.untrusted_text import one_line

FAULTS = {
    "rank": "SIGKILL for a rank",
    "host": "SIGKILL for a host process",
    "save": "SIGKILL for all ranks while half of a checkpoint is written",
    "load": "SIGKILL for a rank, and again while the restarted ranks load",
    "disk": "no space for more than half of a checkpoint",
    "term": "SIGTERM for a host, as when it is preempted",
    "damage": "SIGKILL for all ranks, and the newest checkpoint is cut to half",
}
"""The faults, and what happens in each."""

_PAUSE = 0.005
"""Seconds between two observations; where one takes long, four times as long as that."""

_QUIET = 0.02
"""Seconds without a change after which a checkpoint has been written."""

_FULL = 0.1
"""Seconds for which the disk stays full."""

Key = tuple[str, int]
"""A role and a rank."""

_File = tuple[int, float, int]
"""Size, time of the last change, and inode of a file."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a fault comes, and to whom.

    Attributes:
        step: the step after which it comes; None for a program that reports no steps.
        seconds: how long after the start of the ranks it comes in such a program.
        saves: how many checkpoints must have been written, and left behind by all ranks.
        load: seconds after a restart at which the ranks load.
        victim: the place of the rank or host among all, from 0 to less than 1.
    """

    step: int | None = None
    seconds: float = 0.0
    saves: int = 0
    load: float = 0.0
    victim: float = 0.0


@dataclasses.dataclass
class Record:
    """What was observed in a run. Steps are -1 in a program that reports none.

    Attributes:
        state: how the job has ended; ``reason`` says more.
        began, started, ended: when the job was submitted, its ranks first ran, and it had ended.
        attempts: for each rank and attempt the last report, in their order.
        reports: the last report of each rank in each step, of those that were seen.
        restarts: how often ranks were started again.
        saves: when a checkpoint was written, the last steps of the rank furthest behind, and of that furthest ahead; or
            the step of the checkpoint before, and of this one, as ranks report them.
        struck: the step in which the fault came; None if it did not.
        expected: the step of the newest checkpoint then that all ranks had left behind, or less; None for none.
        back: seconds from the fault to the first step that is new; None if there was none.
        written: the files that the job has written and left, with their sizes.
        results: digests of the files to compare, by path.
    """

    handle: str
    state: State = State.RUNNING
    reason: str = ""
    began: float = dataclasses.field(default_factory=time.time)
    started: float = 0.0
    ended: float = 0.0
    attempts: list[tuple[Key, Progress]] = dataclasses.field(default_factory=list)
    reports: dict[tuple[Key, int], Progress] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    saves: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    struck: int | None = None
    struck_at: float = 0.0
    expected: int | None = None
    back: float | None = None
    written: dict[str, int] = dataclasses.field(default_factory=dict)
    results: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def final(self) -> dict[Key, Progress]:
        return dict(self.attempts)

    @property
    def redone(self) -> int:
        """The number of steps that were done again, by the rank with most of them."""
        found: dict[Key, int] = {}
        for key, before, after in self.resumptions():
            found[key] = found.get(key, 0) + max(0, before.step - after.first_step + 1)
        return max(found.values(), default=0)

    def resumptions(self) -> Iterator[tuple[Key, Progress, Progress]]:
        """Yield, for each rank and restart, the last reports before it and of the attempt after it."""
        last: dict[Key, Progress] = {}
        for key, progress in self.attempts:
            if key in last:
                yield key, last[key], progress
            last[key] = progress


class Run:
    """A job of a drill, while it runs.

    Args:
        folder: the working folder of the job, which nothing else uses.
        least: bytes of a file that counts as a checkpoint.
    """

    def __init__(self, apps: Apps[Any], handle: str, folder: Path, least: int) -> None:
        self.record = Record(handle)
        self._apps, self._app_id = apps, str(parse_app_handle(handle)[2])
        self._paths = state_files.app_paths(self._app_id)
        self._folder, self._least = folder, least
        self._files = self._before = self._read_files()
        self._progress: dict[Path, tuple[Key, Progress]] = {}
        self._changing: tuple[float, tuple[int, int]] | None = None
        """When a checkpoint has last changed, and the steps in which it began to; None once that has been quiet."""
        self._reported = -1
        """The last checkpoint of which all ranks have reported."""

    def watch(self, fault: str, moment: Moment, timeout: float) -> Record:
        """Observe the job until its end, and let a fault come, unless it is empty.

        Args:
            timeout: seconds after which the job is ended.
        """
        record, pause = self.record, _PAUSE
        strike = self._strike(fault, moment) if fault else iter(())
        while not self._apps.wait(self._app_id, pause):
            now = time.time()
            self._observe(now)
            if record.started:
                next(strike, None)
            if now > record.began + timeout and not record.reason:
                record.reason = f"it had not ended after {timeout:.0f} s"
                self._apps.cancel(self._app_id, waits=True)
            pause = max(_PAUSE, 4 * (time.time() - now))
        self._observe(time.time())
        if (found := self._apps.read(self._app_id)) is not None:
            record.state, record.reason = found[1].state, record.reason or one_line(found[1].message, 300)
            record.restarts = count_restarts(found[0])
        record.ended = time.time()
        record.written = self._written()
        return record

    # -- what is observed ----------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        """The last step of the rank that is furthest behind."""
        return min((progress.step for progress in self.record.final.values()), default=-1)

    def _observe(self, now: float) -> None:
        record, before, earlier = self.record, self._files, self.record.attempts
        record.started = record.started or (now if self._ranks() else 0.0)
        for path in Path(self._paths.logs).glob(f"*/*/attempt_*/*/{NAME}"):
            with contextlib.suppress(OSError, ValueError):
                found = parse_progress(safe_files.read_file(path, limit=SIZE, below=self._paths.trusted))
                if found is not None:  # only half a report fits on a full disk
                    key = path.parents[3].name, int(path.parent.name)
                    self._progress[path] = key, found
                    record.reports[key, found.step] = found
        record.attempts = sorted(self._progress.values(), key=lambda attempt: attempt[1].first_time)
        if record.struck is not None and record.back is None:
            last = record.final.values()
            if last and all(rank.first_time > record.struck_at and rank.step > record.struck for rank in last):
                record.back = now - record.struck_at
        self._files = self._read_files()
        reported = min(
            (-1 if rank.checkpoint is None else rank.checkpoint for rank in record.final.values()), default=-1
        )
        if reported > self._reported:
            record.saves = [*(record.saves if self._reported >= 0 else ()), (self._reported, reported)]
            self._reported = reported
        elif self._reported >= 0:
            return
        elif changed := [self._files[path][1] for path in self._checkpoints() if self._files[path] != before.get(path)]:
            known = [attempt for attempt in [*earlier, *record.attempts] if attempt[1].time <= max(changed)]
            steps = [progress.step for progress in dict(known).values()] or [-1]
            self._changing = now, self._changing[1] if self._changing else (min(steps), max(steps))
        elif self._changing and now > self._changing[0] + _QUIET:
            record.saves.append(self._changing[1])
            self._changing = None

    def _read_files(self) -> dict[str, _File]:
        found = dict[str, _File]()
        for folder, _, names in os.walk(self._folder):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):  # it has gone
                    status = os.lstat(path)
                    found[os.path.relpath(path, self._folder)] = status.st_size, status.st_mtime, status.st_ino
        return found

    def _written(self) -> dict[str, int]:
        return {path: file[0] for path, file in self._files.items() if self._before.get(path) != file}

    def _checkpoints(self) -> list[str]:
        return [path for path, size in self._written().items() if size >= self._least]

    def _saves(self) -> list[int]:
        """Return the steps of the checkpoints that all ranks have left behind."""
        return [first for first, last in self.record.saves if last < self._step or self._step < 0]

    def _ranks(self) -> list[int]:
        """Return the processes of the ranks that were started last."""
        if (found := self._apps.read(self._app_id)) is None:
            return []
        return [rank.pid for rank in timeline_of(*found, time.time()).last_ranks() if rank.pid is not None]

    def _hosts(self) -> list[int]:
        record = SupervisorRecord.load(self._paths)
        replicas = [replica.pid for role in record.roles for replica in role.replicas] if record is not None else []
        return [pid for pids in processes.hosts(filter(None, replicas)).values() for pid in pids]

    # -- faults --------------------------------------------------------------------------------------------------------

    def _strike(self, fault: str, moment: Moment) -> Iterator[None]:
        """Let a fault come; a step of the iteration is made after each observation."""
        record = self.record
        while not self._is_due(moment):
            yield
        ranks, saves = self._ranks(), self._saves()
        if fault in ("rank", "load"):
            processes.kill(_one_of(ranks, moment.victim))
        elif fault in ("host", "term"):
            number = signal.SIGTERM if fault == "term" else signal.SIGKILL
            processes.kill(_one_of(self._hosts(), moment.victim), number)
        elif fault == "damage":
            while not self._checkpoints():
                yield
            processes.kill(ranks, signal.SIGSTOP)  # none of them saves or loads what is about to be damaged
            self._files = self._read_files()
            for path in sorted(self._checkpoints(), key=lambda path: self._files[path][1])[-1:]:
                os.truncate(self._folder / path, self._files[path][0] // 2)
            processes.kill(ranks)
            saves = []  # there may be no other one
        else:
            limits = _limit_files(dict.fromkeys(ranks, self._least))
            while not (is_torn := self._least in self._written().values()) and self._ranks() == ranks:
                yield
            processes.kill(ranks if fault == "save" and is_torn else ())
        record.struck, record.struck_at = self._step, time.time()
        record.expected = max(saves, default=None)
        if fault == "load":
            while self._ranks() == ranks:
                yield
            restarted = time.time()
            while time.time() < restarted + moment.load:
                yield
            processes.kill(_one_of(self._ranks(), moment.victim))
        elif fault == "disk":
            while time.time() < record.struck_at + _FULL:
                yield
            _limit_files(limits)

    def _is_due(self, moment: Moment) -> bool:
        if len(self._saves()) < moment.saves:
            return False
        if moment.step is not None:
            return self._step >= moment.step
        return time.time() >= self.record.started + moment.seconds


def _limit_files(limits: Mapping[int, int]) -> dict[int, int]:
    """Limit the size of the files that processes write, in bytes by process; return the limits before.

    So a save is met in its middle, and so a disk is full, without privileges and without a file system of its own. The
    program gets EFBIG where a full disk gives ENOSPC, and half a file from both.
    """
    before = {}
    for pid, limit in limits.items():
        with contextlib.suppress(OSError):  # it has ended
            before[pid], hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
    return before


def _one_of(pids: Sequence[int], victim: float) -> Sequence[int]:
    place = int(victim * len(pids))
    return pids[place : place + 1]
