# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints in the memory of hosts on Slurm: elastic jobs that lose nodes, or hosts that their tasks start again."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from torchx.specs import AppState, RetryPolicy

from tests.clusters.slurm.apps import Apps
from tests.local.test_checkpoints import change_sizes, kill_four_times


class SlurmHosts:
    """The hosts of a job, as ``Training`` uses them.

    Args:
        of_nodes: whether a host is lost with its node, which does not come back; else its task starts it again.
    """

    def __init__(self, apps: Apps, of_nodes: bool) -> None:
        self._apps, self._of_nodes = apps, of_nodes
        self.lost: list[str] = []

    def make(self, folder: Path, command: list[str], replicas: int, **more: object) -> SlurmHosts:
        retries = {} if self._of_nodes else {"max_retries": 9, "retry_policy": RetryPolicy.REPLICA}
        fewest = command[command.index("--nnodes") + 1].partition(":")[0]
        role = self._apps.role(*command, replicas=replicas, min_replicas=int(fewest), **retries)
        self._handle = self._apps.run(role, lease=5)
        return self

    def start(self) -> SlurmHosts:
        return self

    def lose(self, replica: int) -> None:
        if not self._of_nodes:
            self._apps.lose(self._handle, replica)
            return
        self.lost.append(self._apps.hostname(self._handle, replica))
        self._apps.cluster.lose_node(self.lost[-1])

    def wait(self) -> list[int]:
        self._apps.wait(self._handle, AppState.SUCCEEDED)
        return [0]

    def err(self) -> str:
        return self._apps.everything(self._handle)


@pytest.mark.nightly("minutes: lost nodes; elastic jobs, and lost nodes with a spare, are tested every time")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("of_nodes", [True, False], ids=["nodes", "hosts"])
def test_an_elastic_job_goes_on_when_hosts_are_lost_and_come(
    apps: Apps, tmp_path: Path, seed: int, of_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tempfile.mkdtemp(dir="/tmp")  # what the power takes with it cannot clean up
    monkeypatch.setenv("TMPDIR", scratch)
    hosts, draw = SlurmHosts(apps, of_nodes), random.Random(seed)
    sizes = draw.choice(((2, 1), (3, 2, 1)) if of_nodes else ((2, 1, 2), (3, 2, 3, 2, 3)))
    try:
        change_sizes(tmp_path, sizes, draw, returns=not of_nodes, make=hosts.make)
    finally:
        shutil.rmtree(scratch)
        for node in hosts.lost:
            apps.cluster.restore_node(node)


@pytest.mark.nightly("the same on this machine")
@pytest.mark.parametrize("seed", range(10))
def test_kills_at_random_moments(apps: Apps, tmp_path: Path, seed: int) -> None:
    kill_four_times(tmp_path, random.Random(seed), make=SlurmHosts(apps, of_nodes=True).make)
