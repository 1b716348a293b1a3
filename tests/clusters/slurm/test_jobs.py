# SPDX-License-Identifier: BSD-3-Clause
"""Jobs on a real Slurm: how they run and are lost; Monarch clients, and containers by a stand-in."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, BindMount, RetryPolicy

from tests.clusters.slurm.apps import Apps, sh
from tests.clusters.slurm.cluster import SlurmCluster
from tests.waits import WITHIN

WAITS = """
    import os, signal, sys, time
    def stop(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1)
        os.write(1, f"saved {os.environ['RANK']}\\n".encode())  # print is not reentrant
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print("waiting", os.environ["RANK"], flush=True)
    time.sleep(1000)
"""


def test_scancel_gives_them_slurms(apps: Apps) -> None:
    handle = apps.run(apps.torchrun(apps.program(WAITS)))
    apps.wait_for_output(handle, "waiting", 0, times=2)
    apps.wait_for_output(handle, "waiting", 1, times=2)
    subprocess.run(["scancel", handle.rpartition("/")[2]], check=True, timeout=WITHIN)
    assert "Slurm reports CANCELLED" in apps.wait(handle, AppState.CANCELLED).msg
    for replica in (0, 1):
        apps.wait_for_output(handle, "saved", replica, times=2)


def test_roles_are_components_and_a_sidecar_ends_with_the_others(apps: Apps) -> None:
    reader = sh(
        "trap 'echo bye; exit 0' TERM; echo ${replica_id} of ${app_id}, $$TORCHX_RANK0_HOST; sleep 1000 & wait",
        name="reader",
        replicas=2,
        metadata={"monarch": {"sidecar": True}},
    )
    log = "$$MONARCH_LOG_DIR/../../reader/$$k/combined.log"
    awaited = f"for k in 0 1; do while ! test -s {log}; do sleep 0.1; done; done; echo done"
    handle = apps.run(sh("true", name="main"), sh(awaited, name="last"), reader)
    status = apps.wait(handle, AppState.SUCCEEDED)
    app_id = handle.rpartition("/")[2]
    hosts = {f"{r.role}/{r.id}": r.hostname for role in status.roles for r in role.replicas}
    assert len(set(hosts.values())) == 4
    assert apps.output(handle, role="last") == "done\n"
    for replica in (0, 1):
        assert apps.output(handle, replica, "reader").startswith(f"{replica} of {app_id}, {hosts['main/0']}\nbye\n")
    assert apps.mine() == [("app", AppState.SUCCEEDED)]


def test_a_job_whose_dependency_is_never_satisfied_has_failed(apps: Apps) -> None:
    first = apps.run(sh("exit 1"), name="first")
    apps.wait(first, AppState.FAILED)
    handle = apps.run(sh("true"), submit_args=f"--dependency=afterok:{first.rpartition('/')[2]}")
    assert apps.wait(handle, AppState.FAILED).msg == "the job can never start: DependencyNeverSatisfied"
    apps.torchx("cancel", handle)
    job_id = handle.rpartition("/")[2]
    apps.until(lambda: apps.slurm_state(job_id) == "CANCELLED", "an empty queue", handle)


def test_an_app_of_500_replicas(apps: Apps) -> None:
    handle = apps.run(sh("sleep ${replica_id}", replicas=500), name="many", partition="away")
    status = apps.status(handle)
    assert status.state is AppState.PENDING
    assert [replica.id for replica in status.roles[0].replicas] == list(range(500))
    assert {replica.state for replica in status.roles[0].replicas} == {AppState.PENDING}
    assert apps.mine() == [("many", AppState.PENDING)]
    assert apps.described(handle).roles[0].num_replicas == 500
    assert apps.output(handle, 499, "r") == ""
    apps.runner.cancel(handle)
    apps.wait(handle, AppState.CANCELLED)
    apps.runner.delete(handle)
    assert apps.mine() == []


def test_workspace_and_job_dir(apps: Apps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "here.txt").write_text("from the workspace\n")
    handle = apps.run(sh("cat here.txt; pwd"), job_dir=str(tmp_path / "job"), workspace=str(tmp_path / "ws"))
    apps.wait(handle, AppState.SUCCEEDED)
    monkeypatch.chdir("/")
    assert apps.output(handle, 0, "r") == f"from the workspace\n{tmp_path / 'job'}\n"
    assert Path(apps.paths(handle).root).parent == tmp_path / "job"


def test_jobs_that_the_controller_has_forgotten(
    apps: Apps, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.controller(accounting=False, min_job_age=2)
    try:
        good = apps.run(sh("echo well"), name="good")
        bad = apps.run(sh("exit 7"), name="bad")
        # Nobody looks on when these end.
        held = apps.run(sh("true", replicas=4), name="held", comment="a note")
        for handle, words in ((good, "well"), (bad, ""), (held, "")):
            assert words in apps.torchx("log", "--tail", f"{handle}/r/0")
        ids = [handle.rpartition("/")[2] for handle in (good, bad, held)]
        apps.until(lambda: not any(apps.slurm_state(job_id) for job_id in ids), "Slurm to forget", good)
        assert apps.status(good).state is AppState.SUCCEEDED
        status = apps.status(bad)
        assert status.state is AppState.FAILED and status.msg.endswith("exited with code 7")
        assert apps.status(held).roles[0].replicas[3].hostname == "n4"
        assert apps.mine() == [
            ("bad", AppState.FAILED),
            ("good", AppState.SUCCEEDED),
            ("held", AppState.SUCCEEDED),
        ]
        # Not even Slurm's commands are needed any more.
        with monkeypatch.context() as without:
            without.setenv("PATH", "/nonexistent")
            assert apps.output(good, 0, "r") == "well\n"
            assert apps.status(bad).state is AppState.FAILED
    finally:
        cluster.controller()


SERVICES = """
import json
import psutil
from monarch.job import MeshAdminConfig
from torchx_monarch import MonarchJob

job = MonarchJob({"trainers": 2, "loaders": 1}, "monarch_slurm", out_of_cluster={OUT})
job.enable_telemetry(include_dashboard=False, mesh_admin_config=MeshAdminConfig("127.0.0.1:0"))
state = job.state(cached_path=None)
for mesh in (state.trainers, state.loaders):
    mesh.spawn_procs().initialized.get(timeout=240)
listeners = [found.laddr.ip for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_LISTEN]
tables = state.query_engine_client.query("show tables", timeout=120)
job.kill()
print(json.dumps([str(tables), state.admin_url, [ip for ip in listeners if ip != "127.0.0.1"]]))
"""


def client(cluster: SlurmCluster, folder: Path, text: str) -> tuple[Any, str]:
    """Run a Monarch client on what is a login node, and knows the nodes by name: its last line as JSON, and stderr."""
    (folder / "client.py").write_text(text)
    words = f"mount --bind {cluster.conf.parent}/hosts /etc/hosts; exec {sys.executable} client.py"
    login = ["unshare", "--mount", "sh", "-c", words]
    done = subprocess.run(login, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.nightly("9 s of processor time each; monarch_local has both every time")
@pytest.mark.parametrize("out_of_cluster", [False, True])
def test_telemetry_and_the_mesh_admin_reach_the_nodes(
    apps: Apps, cluster: SlurmCluster, tmp_path: Path, out_of_cluster: bool
) -> None:
    """They are, in part, a process of their own, which is started before the hosts are known."""
    (tables, admin, listeners), log = client(cluster, tmp_path, SERVICES.replace("{OUT}", str(out_of_cluster)))
    assert "actors'" in tables and admin.startswith("https://")
    assert "failed" not in log, log
    # Hosts dial a client back, unless it goes through one of them.
    assert len(listeners) == (0 if out_of_cluster else 1)


@pytest.mark.scenario("containers: pyxis", wire="stub")
def test_pyxis_is_given_image_mounts_and_folder(
    apps: Apps, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "data").mkdir()
    given, target = str(tmp_path / "data"), str(tmp_path / "there")
    check = f"import os; print(os.getcwd()); open({target!r} + '/x', 'w')"
    mounts = [BindMount(given, target, read_only=True)]
    role = apps.torchrun(apps.program(check), nproc=1, image="ghcr.io/me/image:1", mounts=mounts, max_retries=1)
    with monkeypatch.context() as within:
        within.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        handle = apps.run(role, container="pyxis")
    status = apps.wait(handle, AppState.FAILED)
    assert status.num_restarts == 1
    assert "Read-only file system" in json.loads(status.structured_error_msg)["message"]["message"]
    assert f"{tmp_path}/work\n" in apps.log(handle)  # either rank may be the first to fail, and the other is stopped
    job = apps.paths(handle).root
    binds = sorted([f"{tmp_path}/work:{tmp_path}/work", f"{given}:{target}:ro", f"{job}:{job}"])
    for line in cluster.pyxis_notes.read_text().splitlines()[-2:]:
        image, told, workdir = line.split("|")
        assert (image, sorted(told.split(",")), workdir) == ("ghcr.io#me/image:1", binds, f"{tmp_path}/work")


@pytest.mark.scenario("containers: pyxis", wire="stub")
def test_an_image_that_pyxis_cannot_import_is_the_cause(apps: Apps) -> None:
    role = sh("true")
    role.image = "missing"
    status = apps.wait(apps.run(role, container="pyxis"), AppState.FAILED)
    assert status.msg.endswith("no container of missing has started: pyxis: failed to import docker image"), status.msg


CHECKPOINTS = """
    import os, sys, time, torchx_monarch
    path = os.environ["CHECKPOINT"]
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "on", os.uname().nodename, flush=True)
    if os.path.exists(path):
        print("resumed", flush=True)
        sys.exit(0)
    for step in torchx_monarch.steps(range(1_000_000)):
        time.sleep(0.001)
    print("saved at", step, torchx_monarch.time_left() is not None, flush=True)
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
    if way == "batch TERM":
        saved = re.findall(r"saved at (\d+) True", "".join(apps.output(handle, replica) for replica in (0, 1)))
        assert len(saved) == 4 and len(set(saved)) == 1
        events = "".join(
            path.read_text() for path in Path(os.environ["MONARCH_STATE_DIR"], "slurm").rglob("events.jsonl")
        )
        assert f"; stopped at step {int(saved[0]):,}, saved; the job goes back into the queue" in events


@pytest.mark.parametrize(
    "roles", [pytest.param(1, marks=pytest.mark.nightly("the contract loses a host of such a job every time")), 2]
)
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
    handle = apps.run(role, *others, lease=5)
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
    history = {node["node"]: node["faults"] for node in json.loads(apps.torchx("monarch", "nodes", "--json"))}
    assert history[lost]["lost"] >= 1  # by the name that `avoid_known_bad` gives to Slurm
