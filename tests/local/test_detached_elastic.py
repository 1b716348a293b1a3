# SPDX-License-Identifier: BSD-3-Clause
"""Roles with min_replicas on this machine: which replicas an app can do without, and what it then says of itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, RetryPolicy, Role

from tests.local.detached import Detached, py, sh
from tests.waits import until

S, F, C = AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED

#: Replica $0 ends with the code in the file of its number, once there is one.
UNTIL_TOLD = "while ! test -s {folder}/$0; do sleep 0.05; done; exit $(cat {folder}/$0)"


def told(folder: Path, **more: Any) -> Role:
    """A role of three replicas of which two are enough."""
    role = sh(UNTIL_TOLD.format(folder=folder), replicas=3, min_replicas=2, **more)
    role.args.append("${replica_id}")
    return role


def tell(folder: Path, replica: int, code: int) -> None:
    (folder / "new").write_text(f"{code}\n")
    os.replace(folder / "new", folder / str(replica))


@pytest.mark.parametrize(("policy", "last"), [(RetryPolicy.APPLICATION, 0), (RetryPolicy.REPLICA, 1)])
def test_a_replica_can_be_spared_and_a_second_cannot(
    apps: Detached, tmp_path: Path, policy: RetryPolicy, last: int
) -> None:
    app_id = apps.run(told(tmp_path, retry_policy=policy))
    tell(tmp_path, 1, 9)
    until(lambda: apps.states(app_id)["r/1"] is F, "the failure")
    assert apps.status(app_id).state is AppState.RUNNING
    spared = [event["message"] for event in apps.events(app_id) if event["kind"] == "replica_spared"]
    assert len(spared) == 1 and spared[0].endswith("; 2 of 3 are left, and 2 are enough")
    tell(tmp_path, 0, 0)
    until(lambda: apps.states(app_id)["r/0"] is S, "the end of replica 0")
    tell(tmp_path, 2, last)
    status = apps.wait(app_id)
    assert status.state is (F if last else S)
    assert apps.states(app_id) == {"r/0": S, "r/1": F, "r/2": F if last else S}
    assert ("replica r/2" in status.msg) is bool(last)


def test_a_host_that_comes_too_late_does_not_keep_the_app(apps: Detached) -> None:
    host = "os.execv(sys.executable, [sys.executable, '-m', 'torchx_monarch.host', '--app', 'a', '--role', 'r',"
    words = "'--replica', '1', '--replicas', '2', '--preload', '', '--', 'torchrun', '--nnodes', '1:2', os.devnull])"
    code = f"import os, sys\nif sys.argv[1] == '1':\n    {host} {words}"
    app_id = apps.run(py(code, "${replica_id}", replicas=2, min_replicas=1))
    assert apps.wait(app_id).state is S
    assert apps.states(app_id) == {"r/0": S, "r/1": C}


PROGRAM = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.05)
print("ended in a world of", os.environ["WORLD_SIZE"], flush=True)
"""


def ranks(apps: Detached, app_id: str) -> list[str]:
    return [event["message"].partition(" (")[0] for event in apps.events(app_id) if event["kind"] == "ranks"]


def test_a_job_goes_on_without_a_lost_host(apps: Detached, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(PROGRAM)
    words = ["--nnodes", "1:3", "--nproc-per-node", "1", "prog.py"]
    more: dict[str, Any] = {"num_replicas": 3, "min_replicas": 1, "retry_policy": RetryPolicy.REPLICA}
    role = Role("r", str(tmp_path), entrypoint="torchrun", args=words, **more)
    app_id = apps.run(role, preload="none", grace=2)
    until(lambda: ranks(apps, app_id) == ["ranks 3/3"], "the ranks")
    os.kill(apps.host(app_id, 1), signal.SIGKILL)
    until(lambda: ranks(apps, app_id) == ["ranks 3/3", "ranks 2/2"], "the ranks of two hosts")
    (tmp_path / "go").touch()
    assert apps.wait(app_id).state is S
    assert apps.states(app_id) == {"r/0": S, "r/1": F, "r/2": S}
    assert "ended in a world of 2\n" in apps.log(app_id, k=2)
