# SPDX-License-Identifier: BSD-3-Clause
"""The life of an app on the detached local scheduler, its logs and retries, and many apps."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchx.schedulers.api import Stream
from torchx.specs import AppDef, AppState, RetryPolicy, Role, macros

from tests.local.detached import NAME, Detached, lives, pid_in, py, sh
from tests.waits import until
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.backend import LocalOpts
from torchx_monarch.backends.local.folder import lock, prune
from torchx_monarch.backends.local.supervision import RoleRecord, SupervisorRecord
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.replica import ReplicaRecord


def test_an_app_that_does_not_exist(apps: Detached) -> None:
    for app_id in ("nothing-x1", "..", ".", "a\0b", "x" * 300):
        assert apps.scheduler.describe(app_id) is None
        apps.scheduler.cancel(app_id)
        apps.scheduler.delete(app_id)
        apps.scheduler.apps.cancel(app_id, 0)
    assert apps.runner.list(NAME) == []


def test_environment_of_a_replica(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_SHELL", "kept")
    monkeypatch.setenv("BOTH", "shell")
    # Short enough for sockets.
    monkeypatch.setenv("MONARCH_STATE_DIR", os.environ["TMPDIR"] + "/s")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    app_id = apps.run(
        py(code, name="first", env={"BOTH": "role", "RANK0": macros.rank0_env}), py(code, name="second", replicas=2)
    )
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    first = json.loads(apps.log(app_id, "first")[0])
    second = json.loads(apps.log(app_id, "second", 1)[0])
    paths = apps.paths(app_id)
    assert (first["FROM_SHELL"], first["BOTH"], second["BOTH"]) == ("kept", "role", "shell")
    assert first[first["RANK0"]] == "localhost"
    assert first["MONARCH_JOB"] == second["MONARCH_JOB"]
    assert first["MONARCH_JOB"].startswith(f"{app_id}:")
    assert first["MONARCH_RENDEZVOUS"] == f"unix:{paths.run}/0.sock"
    assert second["MONARCH_RENDEZVOUS"] == f"unix:{paths.run}/1.sock"
    assert first["MONARCH_RUN_DIR"] == paths.run
    assert first["MONARCH_EVENTS"] == paths.events
    assert second["MONARCH_LOG_DIR"] == f"{paths.logs}/second/1"
    assert second["TORCHELASTIC_ERROR_FILE"] == f"{paths.logs}/second/1/error.json"
    # What is in the user's shell is not written to disk.
    assert "kept" not in Path(paths.request).read_text()


@pytest.mark.parametrize("temporary", ["as it is", "/nonexistent"])
def test_long_paths_get_a_short_folder_for_sockets(
    apps: Detached, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: str
) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / ("long" * 30)))
    if temporary != "as it is":
        monkeypatch.setenv("TMPDIR", temporary)
    app_id = apps.run(sh('echo "$MONARCH_RENDEZVOUS"; test -d "$MONARCH_RUN_DIR" && touch "$MONARCH_RUN_DIR/0.sock"'))
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    sock = Path(apps.log(app_id)[0].strip().removeprefix("unix:"))
    assert len(str(sock)) < 100
    assert not sock.parent.exists()


def test_where_a_program_is_looked_for(apps: Detached, tmp_path: Path) -> None:
    image = tmp_path / "image"
    other = tmp_path / "other"
    for folder, word in ((image, "image"), (other, "path")):
        folder.mkdir()
        program = folder / "prog"
        program.write_text(f"#!/bin/sh\necho {word} $PWD\n")
        program.chmod(0o755)

    def said(role: Role) -> str:
        app_id = apps.run(role)
        assert apps.wait(app_id).state is AppState.SUCCEEDED, apps.status(app_id)
        return apps.log(app_id)[0]

    assert said(Role("r", image=str(image), entrypoint="prog")) == f"image {image}\n"
    assert said(Role("r", image=str(image), entrypoint="./prog")) == f"image {image}\n"
    assert (
        said(Role("r", image=str(image), entrypoint="prog", env={"PATH": f"{other}:/bin:/usr/bin"}))
        == f"path {image}\n"
    )
    assert said(Role("r", image="none", entrypoint=str(other / "prog"))) == f"path {os.getcwd()}\n"


@pytest.mark.parametrize(
    ("entrypoint", "says"),
    [
        ("no-such-program", "No such file or directory: 'no-such-program'"),
        ("./plain", "Permission denied: "),
        ("./headless", "Exec format error: "),
    ],
)
def test_a_program_that_cannot_be_started(apps: Detached, tmp_path: Path, entrypoint: str, says: str) -> None:
    (tmp_path / "plain").write_text("echo hello")
    (tmp_path / "headless").write_text("echo hello")
    (tmp_path / "headless").chmod(0o755)
    alone = {"max_retries": 3, "retry_policy": RetryPolicy.REPLICA, "metadata": {"monarch": {"wrap": False}}}
    role = Role("r", image=str(tmp_path), entrypoint=entrypoint, num_replicas=2, **alone)
    status = apps.wait(app_id := apps.run(role))
    assert status.state is AppState.FAILED
    assert "replica r/0 could not be started: " in status.msg and says in status.msg
    assert status.num_restarts == 0, "another try cannot help"
    assert apps.states(app_id) == {"r/0": AppState.FAILED, "r/1": AppState.CANCELLED}
    assert apps.log(app_id)[-1].startswith("[monarch] replica r/0 could not be started")
    assert apps.record(app_id)["roles"][0]["replicas"][0]["exit_code"] == 127
    role.metadata, role.retry_policy = {}, RetryPolicy.APPLICATION
    status = apps.wait(apps.run(role))
    assert status.state is AppState.FAILED and status.num_restarts == 0
    assert "not started again: the program cannot even begin: all 2 replicas: could not be started: [" in status.msg
    assert says in status.msg


def test_a_working_folder_that_may_not_be_entered(apps: Detached, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    # Root enters any folder by these rights.
    without_rights = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    handle = apps.fresh(
        f"""
from torchx.specs import AppDef, Role
role = Role("r", image={str(closed)!r}, entrypoint="/bin/true")
print(json.dumps(runner.run(AppDef("app", [role]), "monarch_local")))
""",
        wrapper=without_rights,
    )
    assert apps.wait(handle.rpartition("/")[2]).msg == (
        f"replica r/0 could not be started: [Errno 13] Permission denied: '{closed}'"
    )


def test_words_arrive_as_they_are(apps: Detached, tmp_path: Path) -> None:
    folder = tmp_path / "a b'c\"d\n\u00e9"
    folder.mkdir()
    script = folder / "scr ipt\u00fc.py"
    script.write_text("import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['V'], os.getcwd()]))")
    args = ["a b", "", "'", '"', "$HOME", "a\nb", "\u65e5\u672c", "*", "\\", '--x=a b"c,d']
    words = ["-c", 'exec "$0" "$@"', sys.executable, str(script), *args]
    role = Role("r", image=str(folder), entrypoint="sh", args=words, env={"V": "x\n'\u00e9 "})
    app_id = apps.run(role, name="n\u00e9w/\u540d 1")
    assert apps.wait(app_id).state is AppState.SUCCEEDED, apps.log(app_id)
    assert json.loads(apps.log(app_id)[0]) == [args, "x\n'\u00e9 ", str(folder)]
    assert apps.scheduler.list()[0].name == "n\u00e9w/\u540d 1"
    assert "/" not in app_id and app_id.isascii()


def test_events_tell_the_story(apps: Detached) -> None:
    app_id = apps.run(sh("exit 1"))
    apps.wait(app_id)
    kinds = [event["kind"] for event in apps.events(app_id)]
    assert kinds == ["submitted", "supervised", "replica_started", "replica_exited", "ended"]
    assert all(isinstance(event["time"], float) and event["message"] for event in apps.events(app_id))


def test_modules_beside_the_script_do_not_reach_the_supervisor(
    apps: Detached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "selectors", "dataclasses", "torchx_monarch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    app_id = apps.run(sh("true"))
    assert apps.wait(app_id).state is AppState.SUCCEEDED


def test_more_replicas_than_the_limit_on_files_would_allow(apps: Detached) -> None:
    code = """
import resource
from torchx.specs import AppDef, Role
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
alone = {"monarch": {"wrap": False}}
app = AppDef("a", [Role("r", image="", entrypoint="sh", args=["-c", "ulimit -n"], num_replicas=30, metadata=alone)])
print(json.dumps(runner.run(app, "monarch_local").rpartition("/")[2]))
"""
    app_id = apps.fresh(code)
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert {line for k in range(30) for line in apps.log(app_id, k=k)} == {"64\n"}


@pytest.mark.parametrize("limit", [9, 12])
def test_the_limit_of_too_few_open_files_is_named(apps: Detached, limit: int) -> None:
    code = f"""
import resource
from torchx.specs import AppDef, Role
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
try:
    print(json.dumps(runner.run(AppDef("a", [Role("r", image="", entrypoint="true")]), "monarch_local")))
except Exception as error:
    print(json.dumps(str(error)))
"""
    said = apps.fresh(code)
    said = apps.wait(said.rpartition("/")[2]).msg if said.startswith("monarch_local://") else said
    assert said.endswith(f": [Errno 24] Too many open files (RLIMIT_NOFILE is {limit}: ulimit -n)"), said


@pytest.mark.parametrize("command", ["echo loss", "torchrun --no-python echo loss"])
def test_output_of_a_filter_that_ends_after_the_command(apps: Detached, command: str) -> None:
    """Bash does not wait for such a process, and becomes a last command that is not its own."""
    filtered = "while kill -0 $$ 2>/dev/null; do sleep 0.02; done; sed 's/^/filtered /'"
    app_id = apps.run(Role("r", image="", entrypoint="bash", args=["-c", f"{command} > >({filtered})"]))
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id, streams=Stream.STDOUT) == ["filtered loss\n"]


def test_bytes_that_are_no_text(apps: Detached) -> None:
    app_id = apps.run(py(r"import os; os.write(1, b'a\xff\xfe\r\x00b\n' + '\u00e9\u65e5'.encode() + b'\n')"))
    apps.wait(app_id)
    assert apps.log(app_id) == ["a\ufffd\ufffd\r\0b\n", "\u00e9\u65e5\n"]


def test_output_of_orphans_is_kept_while_the_app_runs(apps: Detached, tmp_path: Path) -> None:
    (tmp_path / "orphan.sh").write_text(f"while ! test -e {tmp_path}/late; do sleep 0.02; done; echo late")
    role = sh(f"sh {tmp_path}/orphan.sh & exit 0", name="side")
    app_id = apps.run(sh(f"while ! test -e {tmp_path}/end; do sleep 0.02; done", name="main"), role)
    until(lambda: apps.states(app_id)["side/0"] is AppState.SUCCEEDED, "the end of the role")
    (tmp_path / "late").touch()
    until(lambda: apps.log(app_id, "side") == ["late\n"], "what its child prints after it")
    (tmp_path / "end").touch()
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id, "side") == ["late\n"]


def test_a_job_whose_orphan_holds_the_pipe_ends(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000 & echo done"))
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id) == ["done\n"]


def old_app(name: str, ended: float, state: State = State.SUCCEEDED) -> None:
    paths = state_files.app_paths(name)
    os.makedirs(paths.root)
    record = SupervisorRecord(name, "old", created=ended - 10, state=state, ended=ended)
    record.roles = [RoleRecord("r", [ReplicaRecord(k, state=state, exit_code=0) for k in range(4)])]
    state_files.write_json(paths.status, asdict(record))
    os.utime(paths.status, (ended, ended))


def test_ten_submissions_at_once(apps: Detached) -> None:
    with ThreadPoolExecutor(10) as pool:
        ids = list(pool.map(lambda n: apps.run(sh(f"echo {n}")), range(10)))
    assert len(set(ids)) == 10
    for n, app_id in enumerate(ids):
        assert apps.wait(app_id).state is AppState.SUCCEEDED
        assert apps.log(app_id) == [f"{n}\n"]
    assert len(apps.scheduler.list()) == 10


def test_one_dry_run_is_submitted_once(apps: Detached) -> None:
    info = apps.runner.dryrun(AppDef("a", [sh("echo ${app_id}")]), NAME)
    app_id = apps.runner.schedule(info).rpartition("/")[2]
    with pytest.raises(UserError, match=f"submitted already, as {app_id}"):
        apps.runner.schedule(info)
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id) == [f"{app_id}\n"]


def test_pruning(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    now, day = time.time(), 86400
    old_app("old-kept", now - 13 * day)
    old_app("old-gone", now - 15 * day)
    old_app("old-running", now - 99 * day, state=State.RUNNING)
    held = lock(state_files.app_paths("old-running"))
    trash = Path(state_files.apps_dir(), ".trash-1-x")
    trash.mkdir()
    os.utime(trash, (0, 0))
    Path(state_files.apps_dir(), "mine").mkdir()
    (Path(state_files.apps_dir(), "note.txt")).touch()
    app_id = apps.run(sh("true"))
    apps.wait(app_id)
    until(lambda: not Path(state_files.app_paths("old-gone").root).exists(), "the old app to go")
    kept = {"old-kept", "old-running", "mine", "note.txt", app_id}
    until(lambda: {path.name for path in Path(state_files.apps_dir()).iterdir()} == kept, "the rest to go")
    monkeypatch.setenv("MONARCH_KEEP_DAYS", "1")
    assert prune(state_files.apps_dir()) == ["old-kept"]
    monkeypatch.setenv("MONARCH_KEEP_DAYS", "many")
    assert prune(state_files.apps_dir()) == []
    os.close(held)


def test_waiting_costs_nothing(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000", replicas=3))
    supervisor = psutil.Process(apps.owner(app_id).supervisor.pid)

    def is_at_rest() -> bool:
        before = supervisor.num_ctx_switches().voluntary
        time.sleep(1.5)
        # The supervisor looks for the folder every three seconds; nobody polls.
        return supervisor.num_ctx_switches().voluntary - before < 15

    until(is_at_rest, "a supervisor that has started and that nothing wakes")
    apps.scheduler.apps.cancel(app_id, 0)
    apps.wait(app_id)


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
