# SPDX-License-Identifier: BSD-3-Clause
"""Jobs whose pods are evicted or deleted, or whose user stops them: all ranks save, and no step is done twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from torchx.specs import AppState, BindMount, RetryPolicy

from tests.clusters.kubernetes.apps import Apps
from tests.contract.stops import StoppedJob

# The first test brings the cluster up, and may have to build it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def evict(apps: Apps, job: StoppedJob, replica: int) -> None:
    apps.preempt(job.handle, replica)


def delete(apps: Apps, job: StoppedJob, replica: int) -> None:
    apps.api.delete(f"/api/v1/namespaces/{apps.namespace}/pods/{apps.pod(job.handle, replica)}")


def delete_both(apps: Apps, job: StoppedJob, replica: int) -> None:
    for number in (replica, 1 - replica):
        delete(apps, job, number)


def cancel_save(apps: Apps, job: StoppedJob, replica: int) -> None:
    """Cancel a job, and submit it again."""
    with apps.reached(job.handle) as address:
        apps.torchx("monarch", "cancel", "--save", job.handle, "--address", address)
    apps.wait(job.handle, AppState.CANCELLED)
    job.submit()


KINDS: tuple[Callable[[Apps, StoppedJob, int], None], ...] = (evict, delete, delete_both, cancel_save)


@pytest.fixture
def folder(apps: Apps, tmp_path: Path) -> Path:
    if apps.cluster.stand_ins is None:
        pytest.skip("the pods of the cluster do not see files of this machine")
    return tmp_path


def submit(apps: Apps, folder: Path, each: int, policy: RetryPolicy, stuck: int = -1) -> StoppedJob:
    role = {"max_retries": 100, "retry_policy": policy, "mounts": [BindMount(str(folder), str(folder))]}
    return StoppedJob(apps, folder, each, stuck, role=role, grace=30 if stuck < 0 else 5)


@pytest.mark.nightly("minutes: 32 stops for each seed, of which test_a_preempted_job_goes_on has one")
@pytest.mark.parametrize("policy", [RetryPolicy.APPLICATION, RetryPolicy.REPLICA])
@pytest.mark.parametrize("seed", range(2))
def test_no_step_is_done_twice(apps: Apps, folder: Path, seed: int, policy: RetryPolicy) -> None:
    draw = random.Random(seed)
    jobs = [submit(apps, folder / str(number), draw.randrange(1, 9), policy) for number in range(4)]
    for _ in range(8):
        for job in jobs:
            job.until_trains(draw.randrange(1, 40))
            draw.choice(KINDS)(apps, job, draw.randrange(2))
        for job in jobs:
            job.until_saved()


@pytest.mark.nightly("the same for each kind of stop; test_a_rank_that_does_not_come has one on this machine")
@pytest.mark.parametrize("stop", [evict, delete, cancel_save])
def test_a_rank_that_does_not_come_is_ended_and_named(
    apps: Apps, folder: Path, stop: Callable[[Apps, StoppedJob, int], None]
) -> None:
    job = submit(apps, folder / "job", 1_000_000, RetryPolicy.REPLICA, stuck=3)
    job.until_trains(5)
    first = job.handle
    stop(apps, job, 1)
    said = "; not saved: rank 3 did not come to the step within 4 s"
    job.place.until(lambda: said in f"{apps.log(first)}{apps.status(first).msg}", said, first)
