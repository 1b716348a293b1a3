# SPDX-License-Identifier: BSD-3-Clause
"""Jobs on a real Slurm: they run, fail, are looked at and cancelled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torchx.specs import AppState, RetryPolicy

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
    log = "$$MONARCH_LOG_DIR/../../reader/$$k/stdout.log"
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


def test_failing_role_ends_the_others(apps: Apps) -> None:
    handle = apps.run(sh("sleep 1000", name="main"), sh("echo no; exit 3", name="helper"))
    status = apps.wait(handle, AppState.FAILED)
    assert status.msg.startswith("replica helper/0 ") and "exited with code 3" in status.msg
    states = {f"{r.role}/{r.id}": r.state for role in status.roles for r in role.replicas}
    assert states == {"main/0": AppState.CANCELLED, "helper/0": AppState.FAILED}


def test_role_is_started_again_while_the_others_live(apps: Apps, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    again = sh(f"test -e {flag} && exec sleep 1000; touch {flag}; exit 3", name="again", max_retries=1)
    again.retry_policy = RetryPolicy.ROLE
    handle = apps.run(sh("sleep 1000", name="main"), again)
    apps.wait_for_output(handle, "restart 1", role="again")
    apps.until(
        lambda: [role.replicas[0].state for role in apps.status(handle).roles] == [AppState.RUNNING] * 2, "both", handle
    )
    assert apps.status(handle).num_restarts == 1
    assert "restart" not in apps.output(handle, role="main")


def test_an_app_of_500_replicas(apps: Apps) -> None:
    handle = apps.run(sh("sleep ${replica_id}", replicas=500), name="many", partition="away")
    status = apps.status(handle)
    assert status.state is AppState.PENDING
    assert [replica.id for replica in status.roles[0].replicas] == list(range(500))
    assert {replica.state for replica in status.roles[0].replicas} == {AppState.PENDING}
    assert apps.mine() == [("many", AppState.PENDING)]
    assert apps.fresh(handle, "print(runner.describe(handle).roles[0].num_replicas)") == "500\n"
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
            assert apps.fresh(handle, 'print("".join(runner.log_lines(handle, "r", 0, should_tail=True)))').startswith(
                words
            )
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
