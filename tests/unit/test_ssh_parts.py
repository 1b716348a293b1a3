# SPDX-License-Identifier: BSD-3-Clause
"""monarch_ssh without a server: names of machines, the request, workspaces, what machines' answers mean."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, RetryPolicy, Role, Workspace
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.backend import LogQuery
from torchx_monarch.backends.core.errors import BackendError, StateAccessError, UserError
from torchx_monarch.backends.core.snapshot import RoleSnapshot
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.backends.core.stored_apps import StoredApps
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local import folder
from torchx_monarch.backends.local.supervision import RoleRecord, SupervisorRecord
from torchx_monarch.backends.ssh import workspace
from torchx_monarch.backends.ssh.backend import SshBackend, SshSnapshot, build
from torchx_monarch.backends.ssh.connection import (
    MachineConnection,
    RefusedOrderError,
    SshError,
    at_once,
    explain,
    ssh_arguments,
)
from torchx_monarch.backends.ssh.in_job import entry
from torchx_monarch.backends.ssh.in_job.entry import Code
from torchx_monarch.backends.ssh.in_job.wire import FoundReplica, Layout, Place, folder_name
from torchx_monarch.backends.ssh.request import SshRequest, parse_hosts
from torchx_monarch.client.workspace_sync import current_workspace
from torchx_monarch.components import ft
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_ssh
from torchx_monarch.supervisor import log_files, log_reader
from torchx_monarch.supervisor.replica import ReplicaRecord
from torchx_monarch.system.line_output import lines_of


@pytest.fixture
def runner() -> Runner:
    return Runner("torchx", {"monarch_ssh": monarch_ssh})


def app(*words: str, replicas: int = 1, **more: Any) -> AppDef:
    return AppDef(
        "app", [Role("trainer", "", entrypoint=words[0], args=list(words[1:]), num_replicas=replicas, **more)]
    )


# -- machines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b", ["--", "b"]),
        ("alice@a", ["-l", "alice", "--", "a"]),
        ("10.0.0.3:2222", ["-p", "2222", "--", "10.0.0.3"]),
        ("alice@[fe80::1%eth0]:22", ["-p", "22", "-l", "alice", "--", "fe80::1%eth0"]),
        ("[::1]", ["--", "::1"]),
    ],
)
def test_names_of_machines(text: str, words: list[str]) -> None:
    assert ssh_arguments(text) == words


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=x", "-x@a", "a b", "a:0", "a:65536", "a:x", "::1", "@a", "a/b", "a\n", "[a]b"]
)
def test_no_names_of_machines(text: str) -> None:
    with pytest.raises(UserError, match="is no machine"):
        ssh_arguments(text)


def test_machines_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "machines").write_text("# the lab\nalice@a\n\n  b  # slow\n")
    assert parse_hosts([f"@{tmp_path}/machines", "c"]) == ["alice@a", "b", "c"]
    with pytest.raises(UserError, match="~nosuchuser/f: No such file"):
        parse_hosts(["@~nosuchuser/f"])
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff\n")
    with pytest.raises(UserError, match="binary is no text, with one machine on each line"):
        parse_hosts([f"@{tmp_path}/binary"])


# -- connections


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for ssh on the PATH: it runs what ssh would hand to the shell of a machine; return its log."""
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(
        f'#!/bin/sh\necho $$ >>{tmp_path}/logins\necho a profile\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return tmp_path / "logins"


def test_a_connection_stays_open_and_is_opened_again_when_it_was_lost(ssh: Path) -> None:
    connection = MachineConnection("a", sys.executable, "")
    assert connection.ask("hello")["python"] == sys.executable
    with pytest.raises(RefusedOrderError, match="a: 'no/name' is no id"):
        connection.ask("read", names=["no/name"], brief=True)
    assert connection.ask("read", names=["x"], brief=True) == []
    assert len(ssh.read_text().split()) == 1
    os.kill(int(ssh.read_text()), signal.SIGKILL)
    with pytest.raises(SshError):
        connection.ask("confirm", may_reconnect=False)
    with pytest.raises(SshError, match="a: the connection was lost"):
        connection.ask("confirm", may_reconnect=False)
    connection.ask("hello")
    os.kill(int(ssh.read_text().split()[1]), signal.SIGKILL)
    connection.ask("hello")
    assert len(ssh.read_text().split()) == 3
    connection.close()


def test_a_stopped_ssh_is_killed(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchx_monarch.backends.ssh.connection._END_TIMEOUT", 0.1)
    connection = MachineConnection("a", sys.executable, "")
    connection.ask("hello")
    process = connection._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    connection.close()
    assert process.returncode == -signal.SIGKILL


def test_of_machines_that_are_asked_at_once_the_first_error_is_raised() -> None:
    def call(machine: str) -> str:
        if machine in "bc":
            raise SshError(machine, "is off")
        if machine == "d":
            raise RefusedOrderError(machine, "does not want to")
        return machine

    answers, lost = at_once(call, ["a", "b"])
    assert answers == {"a": "a"} and list(lost) == ["b"]
    for machines, more, reason in [("abc", {"needs_all": True}, "b: is off"), ("bc", {}, "b: is"), ("abd", {}, "d: d")]:
        with pytest.raises(SshError, match=reason):
            at_once(call, list(machines), **more)


# -- the request


def rendered(runner: Runner, app: AppDef, **cfg: Any) -> SshRequest:
    return cast(SshRequest, runner.dryrun(app, "monarch_ssh", cfg=cfg).request)


def test_requests_that_machines_cannot_run(runner: Runner) -> None:
    with pytest.raises((ComponentValidationException, ValueError), match="name the machines"):
        rendered(runner, app("true"))
    with pytest.raises((ComponentValidationException, ValueError), match="workspace s3://code .* no folder"):
        rendered(runner, app("true", workspace=Workspace({"s3://code": ""})), hosts=["a"])


def test_only_hosts_get_the_credentials(runner: Runner) -> None:
    roles = [
        *app("torchrun", "--nnodes", "2", "train.py", replicas=2).roles,
        Role("other", "", entrypoint="true", num_replicas=1, metadata={"monarch": {"wrap": False}}),
    ]
    request = rendered(runner, AppDef("app", roles), hosts=["a", "b"])
    environments = [
        request.of_replica(role, k, "name", ["10.0.0.1", "10.0.0.2"], "secret").roles[0].env
        for role, k in ((0, 0), (0, 1), (1, 0))
    ]
    assert [env.get("MONARCH_CREDENTIALS") for env in environments] == ["secret", "secret", None]
    assert {env["MONARCH_REPLICA0_1"] for env in environments} == {"10.0.0.2"}
    assert "secret" not in str(request)


def test_groups_have_machines_of_their_own(runner: Runner) -> None:
    request = rendered(runner, ft("train.py", j="2x1", group_hosts=2), hosts=["a", "b", "c", "d"])
    assert request.layout.machines == [["a", "b"], ["c", "d"], ["a"]]
    with pytest.raises(UserError, match="group1 has 2 replicas, and .*`hosts` are 3, of which other groups have 2"):
        rendered(runner, ft("train.py", j="2x1", group_hosts=2), hosts=["a", "b", "c"])


# -- workspaces


class Machine:
    """A connection whose other end is this process."""

    def __init__(self) -> None:
        self.code = Code()
        self.received = 0

    def ask(self, order: str, digests: Sequence[str] = (), piece: str = "", may_reconnect: bool = True) -> Any:
        """Carry out an order about code."""
        if order == "expect_code":
            return self.code.expect([*digests])
        self.received += len(piece)
        return self.code.take(base64.b64decode(piece))


def test_a_workspace_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / "state"))
    root = tmp_path / "code"
    (root / "package").mkdir(parents=True)
    (root / "package" / "data").write_bytes(os.urandom(100_000))
    (root / "run.sh").write_text("first")
    (root / "run.sh").chmod(0o755)

    def sent() -> tuple[Machine, str]:
        machine = Machine()
        return machine, workspace.send({str(root): ""}, {"a": cast(MachineConnection, machine)})

    machine, first = sent()
    assert machine.received > 100_000
    machine.code.check_out(first, str(tmp_path / "first"))
    (root / "run.sh").write_text("second")
    machine, second = sent()
    assert 0 < machine.received < 1000 and second != first
    workspace.send({str(root / "package"): ""}, {"a": cast(MachineConnection, machine)})  # of another role
    machine.code.check_out(second, str(tmp_path / "out"))
    assert (tmp_path / "out" / "run.sh").read_text() == "second" and os.access(tmp_path / "out" / "run.sh", os.X_OK)
    assert (tmp_path / "out" / "package" / "data").read_bytes() == (root / "package" / "data").read_bytes()
    # A machine that has lost its power may have lost contents of files as well.
    damaged = max((tmp_path / "state" / "code").iterdir(), key=lambda path: path.stat().st_size)
    damaged.write_bytes(bytes(100_000))
    machine, _ = sent()
    assert machine.received > 100_000
    assert len(list((tmp_path / "state" / "code").iterdir())) == 3, "an upload has no name"


def test_contents_of_workspaces_are_kept_in_a_folder_of_the_user(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("mine")
    os.utime(precious / "thesis.tex", (0, 0))
    code = Path(state_files.state_dir(), "code")
    code.parent.mkdir()
    code.symlink_to(precious)
    with pytest.raises(OSError, match=f"{code} is a symbolic link"):
        Code().expect([])
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]


def test_another_users_list_of_machines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = StoredApps(Layout, "ssh")
    folder = Path(stored.folder)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match=f"{folder} is a symbolic link"):
        stored.store("x@a", Layout([["a"]]))
    with pytest.raises(StateAccessError, match=f"{folder}: is a symbolic link"):
        stored.app_ids()
    (tmp_path / "x").write_text("")
    assert stored.load("x") is None
    assert f"{folder} is a symbolic link" in caplog.text
    stored.remove("x")
    assert (tmp_path / "x").exists()


def test_the_home_folder_is_no_workspace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: Runner) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for home in (tmp_path, tmp_path / "link"):
        monkeypatch.setenv("HOME", str(home))
        role = app("true", "${img_root}", workspace=Workspace({f"file://{tmp_path}": ""}))
        assert rendered(runner, role, hosts=["a"]).workspaces == [{}]
        assert current_workspace() is None
    (tmp_path / "code").mkdir()
    request = rendered(runner, app("true", "${img_root}", workspace=Workspace({f"{tmp_path}/code": ""})), hosts=["a"])
    assert request.workspaces == [{f"{tmp_path}/code": ""}] and request.roles[0].filled("", 0)[0][-2:] == ["true", "."]
    monkeypatch.chdir("code")
    assert current_workspace() == f"{tmp_path}/code"


def test_a_workspace_of_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / "state"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(name)
    machine = Machine()
    role = Role("r", "", workspace=Workspace({f"file://{tmp_path}/one": "", str(tmp_path / "two"): "lib/two"}))
    tree = workspace.send(workspace.projects(role), {"a": cast(MachineConnection, machine)})
    machine.code.check_out(tree, str(tmp_path / "out"))
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.py")} == {
        "one.py",
        "lib/two/two.py",
    }


# -- the state


def found(replica: int, state: State, submitted: SubmittedApp, **more: Any) -> FoundReplica:
    """Return what a machine answers."""
    place = Place("app-1@a", 0, replica, 100.0, Layout([["a", "b"]], "python3"), submitted.pack())
    replica_record = ReplicaRecord(id=replica, state=state, started=101.0, ended=102.0 if state.is_terminal else None)
    record = SupervisorRecord(
        folder_name("app-1@a", 0, replica), "app", 100.0, state, roles=[RoleRecord("trainer", [replica_record])]
    )
    record.ended, record.hostname = replica_record.ended, "ab"[replica]
    for name, value in more.items():
        setattr(record, name, value)
    return FoundReplica(place, record, None)


def two_hosts(**more: Any) -> SubmittedApp:
    return SubmittedApp(app("true", replicas=2), [RoleSpec("trainer", 2, **more)])


@pytest.mark.parametrize(
    ("more", "other", "expected"),
    [
        ({}, State.RUNNING, State.RUNNING),
        ({}, State.FAILED, State.FAILED),
        ({"retry_policy": RetryPolicy.REPLICA, "max_retries": 1}, State.RUNNING, State.RUNNING),
    ],
)
def test_a_machine_that_does_not_answer(more: dict[str, Any], other: State, expected: State) -> None:
    submitted = two_hosts(**more)
    lost = {"b": SshError("b", "connection timed out")}
    snapshot: SshSnapshot = build("app-1@a", [found(0, other, submitted)], lost)
    status = reduce(snapshot)
    assert status.state is expected
    assert "b" in status.message and "timed out" in status.message


@pytest.mark.parametrize(("state", "outcome"), [(State.RUNNING, None), (State.SUCCEEDED, State.SUCCEEDED)])
def test_a_group_whose_machine_does_not_answer_when_the_others_have_ended_is_lost(
    state: State, outcome: State | None
) -> None:
    specs = [RoleSpec(name, min_groups=1, workload=WorkloadKind.RANKS) for name in ("group0", "group1")]
    specs.append(RoleSpec("lighthouse", sidecar=True))
    submitted = SubmittedApp(AppDef("app", [Role(spec.name, "") for spec in specs]), specs)
    answers = [found(0, state, submitted), found(0, State.RUNNING, submitted)]
    for role, answer in zip((0, 2), answers, strict=True):
        answer.place = replace(answer.place, role=role, layout=Layout([["a"], ["b"], ["a"]], "python3"))
    status = reduce(build("app-1@a", answers, {"b": SshError("b", "connection timed out")}))
    assert (status.outcome.state if status.outcome else None) is outcome
    assert status.state is State.RUNNING and "b: connection timed out" in status.message


@pytest.mark.parametrize("damaged", ["place.json", "status.json"])
def test_a_damaged_file_of_a_replica_is_named_and_costs_no_other_app(
    damaged: str,
    runner: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path))

    def ask(self: MachineConnection, order: str, **fields: Any) -> Any:
        try:
            answer = getattr(entry.OrderServer(), order)(**json.loads(json.dumps(fields)))
        except ValueError as error:
            raise RefusedOrderError("a", str(error)) from None
        return json.loads(json.dumps(answer))

    monkeypatch.setattr(MachineConnection, "ask", ask)
    submitted = SubmittedApp(app("true"), [RoleSpec("trainer")])
    for app_id in ("sound-1@a", "broken-1@a"):
        StoredApps(Layout, "ssh").store(app_id, Layout([["a"]]))
        paths = state_files.app_paths(folder_name(app_id, 0, 0))
        os.makedirs(paths.root)
        request.addfinalizer(partial(os.close, folder.lock(paths)))
        place = Place(app_id, 0, 0, 100.0, Layout([["a"]]), submitted.pack())
        state_files.write_json(f"{paths.root}/place.json", asdict(place))
        role = RoleRecord("trainer", [ReplicaRecord(0, State.RUNNING)])
        state_files.write_json(
            paths.status, asdict(SupervisorRecord("", "app", time.time(), State.RUNNING, roles=[role]))
        )
    Path(paths.root, damaged).write_text("{")
    says = f": {paths.root}/{damaged} is damaged: "
    assert [app.app_id for app in runner.list("monarch_ssh")] == ["sound-1@a"]
    assert says in caplog.text
    with pytest.raises(BackendError, match=says):
        runner.status("monarch_ssh://torchx/broken-1@a")


def test_a_followed_log_loses_nothing_when_its_connection_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a progress bar, which is shown in pieces while it is drawn, and is one line later; with only the last line."""
    monkeypatch.setattr(log_reader, "_POLL", 0.0)
    folder = Path(entry.paths_of("x.0.0").replica_logs("trainer", 0))
    folder.mkdir(parents=True)
    log = folder / "combined.log"
    log.write_text("early\nlast\n")
    bar = [*(f"\r{percent}%\r".encode() for percent in range(13)), b"\r\xe2\x96", b"\x88\r"]  # at last a block
    texts = [*bar, b"", b"\nnew 1\nnew 2\n", b"new 3\n"]

    def ask(self: MachineConnection, order: str, **fields: Any) -> Any:
        if fields["start"] and texts:
            with log.open("ab") as file:
                file.write(texts.pop(0))
            if len(texts) == 2:
                raise SshError("a", "it is cut off")
        return entry.OrderServer().log(**fields)

    monkeypatch.setattr(MachineConnection, "ask", ask)
    layout = Layout([["a"]])
    app = cast(Any, SimpleNamespace(app_id="x@a", layout=layout, roles=[RoleSnapshot(RoleSpec("trainer"), [])]))
    query = LogQuery[SshSnapshot](tail=1, follow=True, has_ended=lambda: not texts)
    shown = [text for lines in SshBackend().read_log(app, "trainer", 0, query) for text in lines_of(lines.text)]
    assert (shown[:1], shown[-3:]) == (["last\n"], ["new 1\n", "new 2\n", "new 3\n"])
    assert "early\n" + "".join(shown) == log.read_bytes().decode() and len(shown) > 15


def test_a_followed_log_loses_nothing_after_an_unfinished_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(entry.paths_of("x.0.0").replica_logs("trainer", 0))
    folder.mkdir(parents=True)
    log = folder / "combined.log"
    texts = ["unfinished", " line\n" + "much\n" * log_files.CHUNK]

    def ask(self: MachineConnection, order: str, **fields: Any) -> Any:
        with log.open("a") as file:
            file.write(texts.pop(0) if texts else "")
        return entry.OrderServer().log(**fields)

    monkeypatch.setattr(MachineConnection, "ask", ask)
    monkeypatch.setattr(SshBackend, "poll", 0.0)
    app = cast(
        Any, SimpleNamespace(app_id="x@a", layout=Layout([["a"]]), roles=[RoleSnapshot(RoleSpec("trainer"), [])])
    )
    query = LogQuery[SshSnapshot](tail=1, follow=True, has_ended=lambda: not texts)
    assert "".join(line.text for line in SshBackend().read_log(app, "trainer", 0, query)) == log.read_text()


def test_a_machine_without_this_package_is_told_whatever_its_interpreter() -> None:
    said = "ModuleNotFoundError: No module named 'torchx_monarch'"
    assert explain(said, 1, "").startswith("its Python interpreter lacks torchx-monarch;")
    assert explain(said, 1, "/opt/python").startswith("/opt/python lacks torchx-monarch;")
