# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that Slurm, or their user, stops again and again: all ranks end at one step and save, and none is done twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from torchx.specs import AppState

from tests.clusters.slurm.apps import Apps
from tests.contract.stops import StoppedJob
from tests.waits import WITHIN


class Job(StoppedJob):
    """A job that Slurm queues again. The seconds of ``signal`` include those between two looks of Slurm at the time."""

    place: Apps

    def __init__(self, apps: Apps, folder: Path, each: int, stuck: int = -1, grace: int = 30) -> None:
        super().__init__(apps, folder, each, stuck, role={}, requeue=True, signal="B:TERM@100", grace=grace)

    def until_queued(self) -> None:
        self.place.until(lambda: self.place.slurm_state(self.id) == "PENDING", "the queue", self.handle)


def scontrol(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True, timeout=WITHIN)


def start_soon(jobs: Iterable[Job]) -> None:
    """Have Slurm start jobs that it would hold for two minutes."""
    for job in jobs:
        scontrol("update", f"JobId={job.id}", "StartTime=now+3", "TimeLimit=UNLIMITED")


def send_sigterm(jobs: Sequence[Job]) -> None:
    subprocess.run(["scancel", "--batch", "--signal=TERM", *(job.id for job in jobs)], check=True, timeout=WITHIN)


def reach_time_limit(jobs: Sequence[Job]) -> None:
    """Set a limit whose ``--signal`` is due."""
    for job in jobs:
        ran = subprocess.run(["squeue", "-h", "-j", job.id, "-o", "%M"], capture_output=True, text=True, check=True)
        minutes = int(ran.stdout.strip().split(":")[-2])
        scontrol("update", f"JobId={job.id}", f"TimeLimit={minutes + 2}")


def put_back(jobs: Sequence[Job]) -> None:
    for job in jobs:
        scontrol("requeue", job.id)


def preempt(jobs: Sequence[Job]) -> None:
    with jobs[0].place.preempting():
        for job in jobs:
            job.until_queued()


def cancel_save(jobs: Sequence[Job]) -> None:
    """Cancel jobs, and submit them again."""
    words = (*jobs[0].place.client("")[0], sys.executable, "-m", "torchx.cli.main", "cancel", "--save")
    commands = [subprocess.Popen([*words, job.handle], stderr=subprocess.PIPE, text=True) for job in jobs]
    for job, command in zip(jobs, commands, strict=True):
        said = command.communicate(timeout=WITHIN)[1]
        assert "saved" in said and command.returncode == 0, said
        job.place.wait(job.handle, AppState.CANCELLED)
        job.submit()


#: A preemption, which takes all jobs, is the last.
KINDS = (send_sigterm, reach_time_limit, put_back, cancel_save, preempt)


@pytest.mark.nightly("minutes: 40 stops for each seed, of which test_goes_on_after_the_job_was_queued_again has one")
@pytest.mark.parametrize("seed", range(5))
def test_no_step_is_done_twice(apps: Apps, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    jobs = [Job(apps, tmp_path / str(number), draw.randrange(1, 9)) for number in range(8)]
    for stop in draw.sample(KINDS, len(KINDS)):
        for job in jobs:
            job.until_trains(draw.randrange(1, 40))
        stop(jobs)
        if stop is not cancel_save:
            for job in jobs:
                job.until_queued()
        for job in jobs:
            job.until_saved()
        if stop is not cancel_save:
            start_soon(jobs)
        print(time.strftime("%X"), stop.__name__, [job.saved for job in jobs])


@pytest.mark.nightly("the same for each kind of stop; test_a_rank_that_does_not_come has one on this machine")
def test_a_rank_that_does_not_come_is_ended_and_named(apps: Apps, tmp_path: Path) -> None:
    stops = [stop for stop in KINDS if stop is not put_back]  # Slurm's KillWait is shorter than the grace period
    jobs = {stop: Job(apps, tmp_path / stop.__name__, 1_000_000, stuck=3, grace=5) for stop in stops}
    for job in jobs.values():
        job.until_trains(5)
    for stop, job in jobs.items():
        first = job.handle
        stop([job])
        if stop is not cancel_save:
            job.until_queued()
        told = (Path(apps.paths(first).events)).read_text()
        assert "; not saved: rank 3 did not come to the step within 4 s" in told, told
