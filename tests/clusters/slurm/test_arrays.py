# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Job arrays on a real Slurm. (Those that the controller has forgotten: ``test_jobs``.)"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from torchx.specs import AppState
from torchx.specs.finder import ComponentValidationException

from tests.clusters.slurm.apps import Apps, sh
from tests.waits import WITHIN

R, P, S, F, C = AppState.RUNNING, AppState.PENDING, AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED


def states(apps: Apps, handle: str) -> list[AppState]:
    (role,) = apps.status(handle).roles
    assert [replica.id for replica in role.replicas] == list(range(len(role.replicas)))
    return [replica.state for replica in role.replicas]


def test_each_array_task_is_a_run_of_its_own_and_the_app_is_all_of_them(apps: Apps, tmp_path: Path) -> None:
    script = apps.program("""
        import os, time
        env = os.environ
        what = [env["SLURM_ARRAY_" + name] for name in ("JOB_ID", "TASK_ID", "TASK_COUNT", "TASK_MIN", "TASK_MAX")]
        print("rank", env["RANK"], "of", env["WORLD_SIZE"], "task", *what, env["TORCHX_JOB_ID"], flush=True)
        while not os.path.exists(env["GO"]):
            time.sleep(0.1)
        if what[1] == "4" and env["RANK"] == "1":
            raise ValueError("boom")
        print("done", flush=True)
    """)
    go = tmp_path / "go"
    # Two of them at a time share two nodes: their hosts meet at different ports.
    handle = apps.run(apps.torchrun(script, nproc=1, env={"GO": str(go)}), array="2-6:2%2")
    app_id = handle.rpartition("/")[2]
    for replica in range(4):
        apps.wait_for_output(handle, "rank", replica)
    status = apps.status(handle)
    assert (status.state, states(apps, handle)) == (R, [R, R, R, R, P, P])
    assert "array tasks: 2 running, 1 pending" in status.msg
    assert [replica.hostname for replica in status.roles[0].replicas[:4]] == ["n1", "n2"] * 2
    assert apps.mine() == [("app", R)]
    assert apps.status(f"{handle}_6").state is P
    go.touch()
    status = apps.wait(handle, F)
    assert states(apps, handle) == [S, S, F, F, S, S]
    assert status.msg == "array task 4: role trainer ended with exit code 1"
    assert json.loads(status.structured_error_msg)["message"]["message"].startswith("array task 4: rank 1 (local")
    assert apps.mine() == [("app", F)]
    told = apps.fresh(
        handle,
        """
        print(runner.status(handle).state.name, [one.id for one in runner.status(handle).roles[0].replicas])
        print(runner.status(handle + "_6").state.name, runner.status(handle + "_5"))
        print(runner.describe(handle).roles[0].num_replicas, runner.describe(handle).roles[0].entrypoint)
        print([app.state.name for app in runner.list("monarch_slurm") if app.app_handle == handle])
        for replica in range(6):
            print(replica, *runner.log_lines(handle, "trainer", replica, regex="rank . of"))
        print("alone", *runner.log_lines(handle + "_6", "trainer", 1, regex="rank . of", should_tail=True))
        """,
    )
    assert told.startswith("FAILED [0, 1, 2, 3, 4, 5]\nSUCCEEDED None\n2 torchrun\n['FAILED']\n")
    for replica, task in enumerate((2, 2, 4, 4, 6, 6)):
        line = f"rank {replica % 2} of 2 task {app_id} {task} 3 2 6 {handle}_{task}\n"
        assert f"{replica} [default{replica % 2}]:{line}" in told
    assert f"alone [default1]:{line}" in told
    with pytest.raises(ValueError, match="has no replica 6; it has 0 to 5"):
        apps.output(handle, 6)


def test_one_array_task_is_cancelled_and_then_all(apps: Apps) -> None:
    waits = sh("echo waiting; trap 'sleep 1; echo saved; exit 3' TERM; sleep 1000 & wait")
    handle = apps.run(waits, array="2-5%2")
    for replica in (0, 1):
        apps.wait_for_output(handle, "waiting", replica, role="r")
    with pytest.raises(ComponentValidationException, match="one task of an array, which is deleted as a whole"):
        apps.runner.delete(f"{handle}_2")
    apps.runner.cancel(f"{handle}_3")  # while others of them wait
    apps.runner.cancel(f"{handle}_5")  # while it waits itself
    assert apps.wait(f"{handle}_3", C).msg == "cancelled"
    assert apps.output(handle, 1, "r").startswith("waiting\nsaved\n")
    apps.wait(f"{handle}_5", C)
    apps.wait_for_output(handle, "waiting", 2, role="r")
    assert (apps.status(handle).state, states(apps, handle)) == (R, [R, C, R, C])
    apps.runner.cancel(handle)
    status = apps.wait(handle, C)
    assert (status.msg, states(apps, handle)) == ("cancelled", [C, C, C, C])
    assert [apps.output(handle, replica, "r").count("saved") for replica in range(4)] == [1, 1, 1, 0]
    root = Path(apps.paths(handle).root)
    apps.runner.delete(handle)
    assert (apps.runner.status(handle), apps.runner.status(f"{handle}_2"), apps.mine()) == (None, None, [])
    assert not root.exists()


def test_one_array_task_goes_back_into_the_queue(apps: Apps) -> None:
    again = sh("test $$SLURM_ARRAY_TASK_ID = 1 && test -n $${SLURM_RESTART_COUNT:-''} && exit 0; echo up; sleep 1000")
    handle = apps.run(again, array="0-2%2", requeue=True)
    for replica in (0, 1):
        apps.wait_for_output(handle, "up", replica, role="r")
    app_id = handle.rpartition("/")[2]
    subprocess.run(["scontrol", "requeue", f"{app_id}_1"], check=True, timeout=WITHIN)
    apps.until(lambda: apps.status(f"{handle}_1").state is P, "the queue", handle)
    subprocess.run(["scontrol", "update", f"JobId={app_id}_1", "StartTime=now+2"], check=True, timeout=WITHIN)
    apps.wait_for_output(handle, "up", 2, role="r")  # the third has its place meanwhile
    subprocess.run(["scancel", f"{app_id}_2"], check=True, timeout=WITHIN)
    assert apps.wait(f"{handle}_1", S).num_restarts == 1
    # By its id Slurm knows the last array task, and all of them.
    subprocess.run(["scancel", f"{app_id}_0"], check=True, timeout=WITHIN)
    status = apps.wait(handle, C)
    assert (status.num_restarts, states(apps, handle)) == (1, [C, S, C])
    assert "array task 0: CANCELLED: by scancel" in status.msg


def test_whole_array_is_cancelled_while_some_run_and_some_wait(apps: Apps) -> None:
    handle = apps.run(sh("echo up; trap 'echo saved; exit 3' TERM; sleep 1000 & wait"), array="0-9,20-39:3%2")
    for replica in (0, 1):
        apps.wait_for_output(handle, "up", replica, role="r")
    apps.runner.cancel(handle)
    apps.wait(handle, C)
    assert states(apps, handle) == [C] * 17
    assert [apps.output(handle, replica, "r").count("saved") for replica in (0, 1, 2)] == [1, 1, 0]


def test_array_that_the_cluster_does_not_take(apps: Apps) -> None:
    with pytest.raises(ComponentValidationException, match="--array=0-5000 .* MaxArraySize is 1001, so .* to 1000"):
        apps.run(sh("true"), array="0-5000")
    assert apps.mine() == []
