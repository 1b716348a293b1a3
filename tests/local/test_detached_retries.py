# SPDX-License-Identifier: BSD-3-Clause
"""Retries, and the rules between roles."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torchx.specs import AppDef, AppState, RetryPolicy

from tests.local.detached import Detached, lives, pid_in, sh
from tests.waits import until
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.backend import LocalOpts
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind

S, F, C = AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED
#: Ends when the file is there.
UNTIL = "while ! test -e {folder}/{name}; do sleep 0.05; done;"


def starts(folder: Path, name: str) -> list[str]:
    path = folder / name
    return path.read_text().split() if path.exists() else []


def test_a_program_that_fails_is_started_again_alone(apps: Detached, tmp_path: Path) -> None:
    main = f"echo $MONARCH_RESTART >> {tmp_path}/main$0; test $0$MONARCH_RESTART = 10 && exit 1;"
    main += UNTIL.format(folder=tmp_path, name="go")
    role = sh(main, replicas=2, max_retries=1, retry_policy=RetryPolicy.REPLICA)
    role.args.append("${replica_id}")
    app_id = apps.run(role, sh(f"echo $MONARCH_RESTART >> {tmp_path}/other", name="other"))
    until(lambda: starts(tmp_path, "main1") == ["0", "1"], "the restart")
    (tmp_path / "go").touch()
    status = apps.wait(app_id)
    assert (status.state, status.num_restarts) == (S, 1)
    assert starts(tmp_path, "main0") == starts(tmp_path, "other") == ["0"]


def test_nothing_of_a_failed_start_lives_on(apps: Detached, tmp_path: Path) -> None:
    command = (
        "if test $MONARCH_RESTART = 0; then"
        f" setsid sh -c 'echo $$$$ > {tmp_path}/stray; sleep 1000' &"
        f" while ! test -s {tmp_path}/stray; do sleep 0.02; done;"
        " exit 1; fi; sleep 1000"
    )
    app_id = apps.run(sh(command, max_retries=1, retry_policy=RetryPolicy.REPLICA))
    until(lambda: apps.record(app_id)["roles"][0]["replicas"][0]["restarts"] == 1, "the restart")
    stray = pid_in(tmp_path / "stray")
    assert stray and not lives(stray)
    apps.scheduler.apps.cancel(app_id, 0)
    assert apps.wait(app_id).num_restarts == 1


def test_an_old_error_file_is_not_taken_for_a_new_one(apps: Detached) -> None:
    command = 'if test $MONARCH_RESTART = 0; then echo \'{"message": "old"}\' > $TORCHELASTIC_ERROR_FILE; fi; exit 1'
    app_id = apps.run(sh(command, max_retries=1))
    status = apps.wait(app_id)
    assert "old" not in status.msg and status.structured_error_msg == "<NONE>"
    assert Path(apps.paths(app_id).replica_logs("r", 0), "error.json.0").exists()


def test_an_error_file_counts_whatever_its_time(apps: Detached, tmp_path: Path) -> None:
    """The clock of a file server may be behind, and a role may name a file that an earlier job has left."""
    error_file = tmp_path / "error.json"
    error_file.write_text('{"message": "of an earlier job"}')
    role = sh("exit 1")
    role.env["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    assert "earlier" not in apps.wait(apps.run(role)).structured_error_msg
    assert not error_file.exists()
    role.args[-1] = (
        f"""echo '{{"message": "out of cheese"}}' > {error_file}; touch -d '1 hour ago' {error_file}; exit 1"""
    )
    assert "out of cheese" in apps.wait(apps.run(role)).structured_error_msg
    error_file.unlink()
    os.mkfifo(error_file)
    role.args[-1], role.max_retries = "exit 1", 1
    apps.wait(apps.run(role))
    assert error_file.is_fifo()


def run_as_hosts(apps: Detached, command: str, **more: Any) -> str:
    """Submit two replicas of a shell command that the supervisor takes for hosts of ranks; return the app's id."""
    app = AppDef("app", [sh(command, replicas=2, **{"max_retries": 1, "retry_policy": RetryPolicy.REPLICA, **more})])
    submitted = SubmittedApp(app, [RoleSpec.from_role(app.roles[0], workload=WorkloadKind.RANKS)])
    backend = apps.scheduler.inner
    app_id = backend.submit(backend.render(app, submitted, LocalOpts(grace=5)), submitted, "")
    return str(app_id)


def test_a_host_that_is_killed_after_its_role_has_succeeded_is_not_started_again(
    apps: Detached, tmp_path: Path
) -> None:
    # It would wait for the hosts that have ended. A shell script stands in for the hosts.
    command = f"test ${{replica_id}} = 1 && exit 0; {UNTIL.format(folder=tmp_path, name='go')} kill -9 $$$$"
    app_id = run_as_hosts(apps, command)
    until(lambda: apps.states(app_id)["r/1"] is S, "the end of the other host")
    (tmp_path / "go").touch()
    status = apps.wait(app_id)
    assert (status.state, status.num_restarts) == (S, 0)
    assert "killed by signal 9 (SIGKILL); its role had succeeded" in apps.events(app_id)[-2]["message"]


def test_a_host_that_replaces_another_ends_when_its_role_has_succeeded_meanwhile(
    apps: Detached, tmp_path: Path
) -> None:
    # Replica 0 may be killed between the announcement of the result and the exit of the host that has read it.
    host = f"{sys.executable} -m torchx_monarch.host --app a --role r --replicas 2 -- python -c pass"
    first = f"test $MONARCH_RESTART = 0 && kill -9 $$$$; touch {tmp_path}/go; exec {host}"
    command = f"if test ${{replica_id}} = 0; then {first}; fi; {UNTIL.format(folder=tmp_path, name='go')}"
    app_id = run_as_hosts(apps, command)
    status = apps.wait(app_id)
    assert (status.state, status.num_restarts) == (S, 1)


def test_a_host_that_comes_too_late_does_not_keep_the_app(apps: Detached) -> None:
    host = f"{sys.executable} -m torchx_monarch.host --app a --role r --replica 1 --replicas 2 --preload ''"
    command = f"test ${{replica_id}} = 0 || exec {host} -- torchrun --nnodes 1:2 /dev/null"
    app_id = run_as_hosts(apps, command, max_retries=0, min_replicas=1)
    assert apps.wait(app_id).state is S
    assert apps.states(app_id) == {"r/0": S, "r/1": C}


def test_siblings_may_end_by_themselves(apps: Detached, tmp_path: Path) -> None:
    command = f"if test $0 = 0; then exit 1; fi; trap 'touch {tmp_path}/told' TERM; sleep 1; echo ended; exit 7"
    role = sh(command, replicas=2)
    role.args.append("${replica_id}")
    app_id = apps.run(role, sh("trap '' TERM; while true; do sleep 0.05; done", name="side"), grace=1)
    status = apps.wait(app_id)
    assert "replica r/0" in status.msg, "the first failure is the cause"
    assert not (tmp_path / "told").exists()
    assert apps.log(app_id, k=1)[0] == "ended\n"
    assert apps.record(app_id)["roles"][0]["replicas"][1]["exit_code"] == 7
