# SPDX-License-Identifier: BSD-3-Clause
"""Roles with min_replicas on this machine: which replicas an app can do without, and what it then says of itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchx.runner import Runner, get_runner
from torchx.specs import AppState, RetryPolicy, Role

from tests.local.detached import Detached, py, sh
from torchx_monarch.components import spmd
from torchx_monarch.insight import events

Eventually = Callable[..., object]

S, F, C = AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED

#: Replica $0 ends with the code in the file of its number, once there is one.
UNTIL_TOLD = "while ! test -s {folder}/$0; do sleep 0.05; done; exit $(cat {folder}/$0)"


@pytest.fixture
def apps() -> Detached:
    return Detached()


def told(folder: Path, **more: Any) -> Role:
    """A role of three replicas of which two are enough."""
    role = sh(UNTIL_TOLD.format(folder=folder), replicas=3, min_replicas=2, **more)
    role.args.append("${replica_id}")
    return role


def tell(folder: Path, replica: int, code: int) -> None:
    (folder / "new").write_text(f"{code}\n")
    os.replace(folder / "new", folder / str(replica))


@pytest.mark.parametrize("policy", list(RetryPolicy))
@pytest.mark.parametrize("last", [0, 1])
def test_a_replica_can_be_spared_and_a_second_cannot(
    apps: Detached, tmp_path: Path, eventually: Eventually, policy: RetryPolicy, last: int
) -> None:
    app_id = apps.run(told(tmp_path, retry_policy=policy))
    tell(tmp_path, 1, 9)
    eventually(lambda: apps.states(app_id)["r/1"] is F, "the failure")
    assert apps.status(app_id).state is AppState.RUNNING
    spared = [event["message"] for event in apps.events(app_id) if event["kind"] == "replica_spared"]
    assert len(spared) == 1 and spared[0].endswith("; 2 of 3 are left, and 2 are enough")
    tell(tmp_path, 0, 0)
    eventually(lambda: apps.states(app_id)["r/0"] is S, "the end of replica 0")
    tell(tmp_path, 2, last)
    status = apps.wait(app_id)
    assert status.state is (F if last else S)
    assert apps.states(app_id) == {"r/0": S, "r/1": F, "r/2": F if last else S}
    assert ("replica r/2" in status.msg) is bool(last)


def test_a_host_that_comes_too_late_does_not_keep_the_app(apps: Detached) -> None:
    host = "os.execv(sys.executable, [sys.executable, '-m', 'torchx_monarch.host', '--app', 'a', '--role', 'r',"
    words = "'--replica', '1', '--replicas', '2', '--', 'torchrun', '--nnodes', '1:2', os.devnull])"
    code = f"import os, sys\nif sys.argv[1] == '1':\n    {host} {words}"
    app_id = apps.run(py(code, "${replica_id}", replicas=2, min_replicas=1))
    assert apps.wait(app_id, 90).state is S
    assert apps.states(app_id) == {"r/0": S, "r/1": C}


class Job:
    """A torchrun job of one to three replicas; its ranks note their size and go on until ``go`` is there."""

    def __init__(
        self,
        runner: Runner,
        work: Path,
        max_retries: int = 0,
        program: str = "",
        **cfg: int,
    ) -> None:
        self._runner, self._work = runner, work
        (work / "prog.py").write_text(
            "import os, sys, time\nsize, attempt = os.environ['WORLD_SIZE'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
            f"{program}\n"
            "while not os.path.exists('go'):\n    time.sleep(0.05)\n"
            "print('ended in a world of', size, flush=True)\n"
        )
        app = spmd("prog.py", j="1:3x1", max_retries=max_retries)
        app.roles[0].retry_policy = RetryPolicy.REPLICA
        self.handle = runner.run(app, "monarch_local", cfg={"preload": "none", "grace": 2, **cfg})
        self.app = Path(os.environ["MONARCH_STATE_DIR"], "apps", self.handle.rpartition("/")[2])

    def ranks(self) -> list[str]:
        return [event["message"].partition(" (")[0] for event in self.events() if event["kind"] == "ranks"]

    def events(self) -> list[dict[str, Any]]:
        return events.read(self.app / "events.jsonl")[0]

    def kill(self, replica: int) -> None:
        supervisor = json.loads((self.app / "supervisor.json").read_text())["supervisor"]["pid"]
        for one in psutil.Process(supervisor).children():
            words = one.cmdline()
            if words[words.index("--replica") + 1] == str(replica):
                one.kill()

    def wait(self) -> tuple[AppState, list[AppState], str]:
        """The state of the app, those of its replicas, its message."""
        status = self._runner.wait(self.handle, wait_interval=0.1)
        assert status is not None
        return status.state, [replica.state for replica in status.roles[0].replicas], status.msg

    def finish(self) -> tuple[AppState, list[AppState], str]:
        (self._work / "go").touch()
        return self.wait()

    def log(self, replica: int) -> str:
        return "".join(self._runner.log_lines(self.handle, "prog", replica))


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.chdir(tmp_path)
    with get_runner() as runner:
        yield runner


def test_a_job_goes_on_without_a_lost_host(runner: Runner, tmp_path: Path, eventually: Eventually) -> None:
    job = Job(runner, tmp_path)
    eventually(lambda: job.ranks() == ["ranks 3/3"], "the ranks")
    job.kill(1)
    eventually(lambda: job.ranks() == ["ranks 3/3", "ranks 2/2"], "the ranks of two hosts")
    assert job.finish() == (S, [S, F, S], "<NONE>")
    assert "ended in a world of 2" in job.log(2)


def test_a_lost_host_is_started_again_and_joins(runner: Runner, tmp_path: Path, eventually: Eventually) -> None:
    job = Job(runner, tmp_path, max_retries=1)
    eventually(lambda: job.ranks() == ["ranks 3/3"], "the ranks")
    job.kill(2)
    eventually(lambda: job.ranks()[1:] and job.ranks()[-1] == "ranks 3/3", "the ranks of three hosts again")
    assert job.finish() == (S, [S, S, S], "<NONE>")
    assert "ended in a world of 3" in job.log(2)
    assert runner.status(job.handle).num_restarts == 1
