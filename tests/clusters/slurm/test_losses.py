# SPDX-License-Identifier: BSD-3-Clause
"""What is lost on a real Slurm, and comes back: hosts, nodes, jobs that go back into the queue."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest
from torchx.specs import AppState, RetryPolicy

from tests.clusters.slurm.apps import Apps, sh
from tests.clusters.slurm.cluster import SlurmCluster
from tests.waits import WITHIN

CHECKPOINTS = """
    import os, signal, sys, time
    path = os.environ["CHECKPOINT"]
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "on", os.uname().nodename, flush=True)
    if os.path.exists(path):
        print("resumed", flush=True)
        sys.exit(0)
    time.sleep(1000)
"""


DIES_AS_HOST_0 = """
    import os, sys
    words = sys.orig_argv
    if "torchx_monarch.host" in words and words[words.index("--replica") + 1] == "0":
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_nobody_waits_for_a_host_0_that_was_lost_before_the_hosts_had_met(apps: Apps, tmp_path: Path) -> None:
    """The other host would wait for it for ``host_timeout``, 300 s; ``max_retries`` starts both again."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(DIES_AS_HOST_0))
    role = apps.torchrun(apps.program("pass"), env={"PYTHONPATH": str(tmp_path / "site")}, max_retries=1)
    role.retry_policy = RetryPolicy.ROLE
    handle = apps.run(sh("exec sleep 1000", "other"), role)
    status = apps.wait(handle, AppState.FAILED)
    assert [replica.state for replica in status.roles[-1].replicas] == [AppState.FAILED, AppState.CANCELLED]
    assert status.msg.startswith("replica trainer/0 ") and "killed by signal 9" in status.msg


@pytest.mark.parametrize("way", ["batch TERM", "node"])
def test_goes_on_after_the_job_was_queued_again(
    apps: Apps, cluster: SlurmCluster, checkpoint: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself when Slurm says (``--signal``) that its time ends, and by Slurm after the loss of a node."""
    scratch = tempfile.mkdtemp(dir="/tmp")  # what the power takes with it cannot clean up
    monkeypatch.setenv("TMPDIR", scratch)
    handle = apps.run(apps.torchrun(apps.program(CHECKPOINTS), env={"CHECKPOINT": str(checkpoint)}), requeue=True)
    app_id = handle.rpartition("/")[2]
    for replica in (0, 1):
        apps.wait_for_output(handle, "attempt 0", replica, times=2)
    checkpoint.touch()
    if way == "node":
        cluster.lose_node("n2")
    else:
        subprocess.run(["scancel", "--batch", "--signal=TERM", app_id], check=True, timeout=WITHIN)
    apps.until(lambda: apps.slurm_state(app_id) == "PENDING", "the queue", handle)
    assert apps.status(handle).state is AppState.PENDING
    # Slurm would hold it for two minutes: a node that still knows the batch step of before refuses the next one.
    subprocess.run(["scontrol", "update", f"JobId={app_id}", "StartTime=now+3"], check=True, timeout=WITHIN)
    try:
        status = apps.wait(handle, AppState.SUCCEEDED)
    finally:
        shutil.rmtree(scratch)
        if way == "node":
            cluster.restore_node("n2")
    assert status.num_restarts == 1
    hosts = [replica.hostname for replica in status.roles[0].replicas]
    assert len(set(hosts)) == 2
    assert way != "node" or "n2" not in hosts
    for replica in (0, 1):
        assert apps.output(handle, replica).count("resumed") == 2


@pytest.mark.parametrize("roles", [1, 2])
def test_a_spare_node_takes_the_place_of_a_lost_one(
    apps: Apps, cluster: SlurmCluster, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, roles: int
) -> None:
    """Also if the job has two roles, of which the other goes on."""
    scratch = tempfile.mkdtemp(dir="/tmp")  # what the power takes with it cannot clean up
    monkeypatch.setenv("TMPDIR", scratch)
    metadata = {"monarch": {"spares": 1}}
    role = apps.torchrun(apps.program(CHECKPOINTS), env={"CHECKPOINT": str(checkpoint)}, metadata=metadata)
    waits = ["--no-python", "sh", "-c", f"until [ -e {checkpoint}.end ]; do sleep 0.1; done"]
    others = [apps.torchrun(*waits, nproc=1, replicas=1, name="other", metadata=metadata)] * (roles - 1)
    handle = apps.run(role, *others, peer_timeout=2)
    for replica in (0, 1):
        apps.wait_for_output(handle, "attempt 0", replica, times=2)
    checkpoint.touch()
    lost = apps.hostname(handle, 1)
    cluster.lose_node(lost)
    try:
        apps.until(lambda: apps.output(handle, 2).count("resumed") == 2, "the spare node", handle)
        Path(f"{checkpoint}.end").touch()
        status = apps.wait(handle, AppState.SUCCEEDED)
    finally:
        shutil.rmtree(scratch)
        cluster.restore_node(lost)
    apps.until(lambda: apps.slurm_state(handle.rpartition("/")[2]) == "COMPLETED", "Slurm's word", handle)
    assert status.num_restarts == 1
    assert apps.output(handle, 2).count("resumed") == 2 and "resumed" not in apps.output(handle, 1)
