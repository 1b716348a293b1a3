# SPDX-License-Identifier: BSD-3-Clause
"""monarch_docker without a daemon: the request, what containers' states mean, an app as one word."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests
from docker.errors import APIError
from torchx.runner import Runner
from torchx.specs import AppDef, BindMount, InvalidRunConfigException, Resource, RetryPolicy, Role

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.snapshot import Outcome, seconds
from torchx_monarch.backends.core.state import pending_stop, reduce
from torchx_monarch.backends.core.state_files import DamagedFileError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.docker import connection, request, snapshot
from torchx_monarch.backends.docker.backend import DockerBackend
from torchx_monarch.backends.docker.snapshot import DockerSnapshot
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_docker


@pytest.fixture
def runner() -> Runner:
    return Runner("torchx", {"monarch_docker": monarch_docker})


def trainer(name: str = "trainer", replicas: int = 2, gpu: int = 0, **more: Any) -> Role:
    args = ["--nnodes", str(replicas), "--nproc-per-node", "2", "train.py"]
    resource = Resource(cpu=1, gpu=gpu, memMB=512)
    return Role(name, "image", entrypoint="torchrun", args=args, num_replicas=replicas, resource=resource, **more)


def containers(runner: Runner, *roles: Role, name: str = "app", **cfg: Any) -> list[dict[str, Any]]:
    info = runner.dryrun(AppDef(name, list(roles)), "monarch_docker", cfg=cfg)
    return [asdict(container) for container in info.request.containers]


# -- the request


@pytest.mark.parametrize("app", ["a" * 80, "-_-App.1", "name with blanks/and ümlauts"])
@pytest.mark.parametrize("roles", [("r",), ("x" * 70 + "a", "x" * 70 + "b"), ("A_b", "a-b"), ("--",), ("a..b", "..")])
def test_names_are_valid_and_differ(app: str, roles: tuple[str, ...]) -> None:
    found = request.host_names(f"{app}-x1y2z3", {role: 1001 for role in roles})
    names = [name for of_role in found.values() for name in of_role]
    assert len(set(names)) == 1001 * len(roles)
    for name in names:
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name), name


def test_only_submitted_hosts_have_the_secret(runner: Runner) -> None:
    role = Role("reader", "image", entrypoint="sh", args=["-c", "true"])
    mounts = [BindMount("/a", "/b")]
    info = runner.dryrun(AppDef("app", [trainer(mounts=mounts, gpu=1), role]), "monarch_docker")
    shown = str(info) + json.dumps(asdict(info.request))
    assert "MONARCH_CREDENTIALS" not in shown
    made: list[dict[str, Any]] = []

    def create(image: str, command: list[str], **options: Any) -> SimpleNamespace:
        made.append(options)
        return SimpleNamespace(start=lambda: None)

    def nothing(*_: Any) -> None: ...

    client = SimpleNamespace(containers=SimpleNamespace(create=create))
    backend = DockerBackend()
    vars(backend).update(_client=client, _pull=nothing, _ensure_network=nothing, _cancelled=dict)
    backend.submit(info.request, info.submitted, "secret")
    given = [options["environment"].get("MONARCH_CREDENTIALS") for options in made]
    assert given == ["secret", "secret", None]
    assert {options["labels"][request.LABEL_APP] for options in made} == {info.submitted.pack()}
    assert {options["labels"][request.LABEL_GRACE] for options in made} == {"30"}
    assert str(info) + json.dumps(asdict(info.request)) == shown


def test_what_names_another_job_is_not_copied(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_CREDENTIALS", "of the job that this is submitted from")
    monkeypatch.setenv("MONARCH_RUN_DIR", "/theirs")
    monkeypatch.setenv("MONARCH_MINE", "kept")
    role = Role("reader", "image", entrypoint="sh", env={"MONARCH_LOG_DIR": "/logs"})
    (made,) = containers(runner, role, copy_env=["MONARCH_*"])
    env = made["kwargs"]["environment"]
    assert "MONARCH_CREDENTIALS" not in env and "MONARCH_RUN_DIR" not in env
    assert (env["MONARCH_MINE"], env["MONARCH_LOG_DIR"]) == ("kept", "/logs")


def test_retries_are_dockers_and_only_lost_replicas_are_replacements(runner: Runner) -> None:
    for policy, replaced in ((RetryPolicy.REPLICA, True), (RetryPolicy.APPLICATION, False)):
        made = containers(runner, trainer(max_retries=3, retry_policy=policy))
        assert made[0]["kwargs"]["restart_policy"] == {"Name": "on-failure", "MaximumRetryCount": 3}
        assert ("--replacements" in made[0]["command"]) == replaced
        assert made[0]["kwargs"]["shm_size"] == "512m"


def test_replicas_get_gpus_of_their_own(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(replicas: int) -> list[Any]:
        made = containers(runner, trainer(replicas=replicas, gpu=2))
        (requests,) = zip(*(container["kwargs"]["device_requests"] for container in made), strict=True)
        return [request["DeviceIDs"] or request["Count"] for request in requests]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert devices(2) == [["4", "5"], ["6", "7"]]
    assert devices(1) == [2]  # dockerd chooses
    assert devices(3) == [2, 2, 2]


@pytest.mark.parametrize(
    ("roles", "cfg", "words"),
    [
        ((trainer(),), {"rendezvous_port": 70000}, "rendezvous_port.*1 to 65535"),
        ((trainer("a"), trainer("b")), {"rendezvous_port": 65535}, "rendezvous_port.*1 to 65534"),
    ],
)
def test_senseless_requests_are_refused(
    runner: Runner, roles: tuple[Role, ...], cfg: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, InvalidRunConfigException), match=words):
        containers(runner, *roles, **cfg)


# -- states

NOW = 1_795_000_000.0


def stamp(when: float) -> str:
    return datetime.fromtimestamp(when, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ") if when else "0001-01-01T00:00:00Z"


def one(
    role: str, status: str = "exited", code: int = 0, ended: float = NOW - 100, id: int = 0, **state: Any
) -> SimpleNamespace:
    """A container as docker-py has it."""
    labels = {"torchx.pytorch.org/role-name": role, "torchx.pytorch.org/replica-id": str(id)}
    started = 0 if status == "created" else NOW - 200
    times = {"StartedAt": stamp(started), "FinishedAt": stamp(ended if started else 0)}
    attrs = {
        "Name": f"/{role}-{id}",
        "Created": stamp(NOW - 300),
        "State": {"Status": status, "ExitCode": code, **times, **state},
        "HostConfig": {"Memory": 512 << 20},
        "NetworkSettings": {"Networks": {"torchx": {"IPAddress": "10.0.0.1"}}},
        "Config": {"Labels": labels, "Env": ["MONARCH_STARTS=/tmp/a:/var/tmp/a", "A=b=c"]},
    }
    return SimpleNamespace(id=f"{role}/{id}", attrs=attrs, labels=labels)


def spec(name: str, replicas: int = 1, fewest: int | None = None, hosts: bool = False) -> RoleSpec:
    workload = WorkloadKind.RANKS if hosts else WorkloadKind.NONE
    return RoleSpec(name, replicas, fewest, sidecar=name == "sidecar", workload=workload)


def build(
    specs: list[RoleSpec],
    *found: SimpleNamespace,
    cancelled: float = 0.0,
    results: Mapping[str, HostResult] | None = None,
    record: str | None = None,
) -> DockerSnapshot:
    if record is None:
        roles = [Role(spec.name, "image", num_replicas=spec.replicas) for spec in specs]
        record = SubmittedApp(AppDef("name", roles), specs).pack()
    labels = {request.LABEL_APP: record, request.LABEL_GRACE: "30"}
    for container in found:
        container.labels.update(labels)
    ending = Outcome(State.CANCELLED, "SIGTERM", time=cancelled) if cancelled else None
    return snapshot.build("app-1", cast(Any, found), ending, results or {})


RUNS = one("main", "running")


def test_what_the_status_of_a_container_means() -> None:
    found = [
        one("main", status, code, id=id)
        for id, (status, code) in enumerate(
            [("created", 0), ("restarting", 1), ("running", 0), ("exited", 0), ("dead", 1)]
        )
    ]
    states = [State.PENDING, State.PENDING, State.RUNNING, State.SUCCEEDED, State.FAILED]
    assert [replica.state for replica in build([spec("main", 5)], *found).replicas] == states
    assert build([spec("main")], one("main", "created"), cancelled=NOW).replicas[0].state is State.CANCELLED


REMOVED = "the container of replica {} was removed (docker rm), and its log with it"


@pytest.mark.parametrize(
    ("found", "sizes", "hosts", "state", "stop", "message"),
    [
        # The other hosts of the role wait forever for the removed one.
        ([RUNS], (3, 0), True, State.RUNNING, True, f"{REMOVED.format('main/1')}; 1 more were removed"),
        (
            [one("main", code=137)],
            (2, 0),
            True,
            State.FAILED,
            False,
            REMOVED.format("main/1"),
        ),  # after its grace period
        # Other programs may have ended before they were removed.
        ([one("o", "running")], (1, 1), False, State.RUNNING, False, REMOVED.format("main/0")),
        # All are created before the first one starts.
        ([one("main", "created")], (2, 1), True, State.PENDING, False, ""),
    ],
)
def test_state_without_some_containers(
    found: list[SimpleNamespace], sizes: tuple[int, int], hosts: bool, state: State, stop: bool, message: str
) -> None:
    specs = [spec("main", sizes[0], hosts=hosts), *([spec("o", sizes[1])] if sizes[1] else [])]
    app = build(specs, *found)
    status = reduce(app)
    assert (status.state, pending_stop(app) is not None, status.message) == (state, stop, message)


def test_a_container_becomes_a_replica() -> None:
    first, second = one("main", code=137, ended=NOW - 50, id=1), one("main", code=1, ended=NOW - 49)
    first.attrs["RestartCount"] = 3
    app = build([spec("main", 2)], second, first)
    assert [replica.id for replica in app.replicas] == [0, 1]
    replica = app.replicas[1]
    assert (replica.hostname, replica.address, replica.restarts) == ("main-1", "", 3)
    assert (replica.started, replica.ended) == (NOW - 200, NOW - 50)
    assert app.started == app.created  # dockerd knows the latest start alone
    status = reduce(app)
    assert status.cause == replica  # the first to fail
    assert status.message == "replica main/1 was killed by signal 9 (SIGKILL)"
    assert app.replicas[0].failure == "replica main/0 exited with code 1"
    assert (app.name, app.grace, app.created) == ("name", 30.0, NOW - 300)
    (starved,) = build([spec("main")], one("main", code=137, OOMKilled=True)).replicas
    assert starved.failure.endswith("of which it had 512 MB (memMB)")
    (running,) = build([spec("main")], RUNS).replicas
    assert running.address == "10.0.0.1"
    (broken,) = build([spec("main")], one("main", code=127, Error="no such file")).replicas
    assert broken.failure == "replica main/0 no such file"


def test_the_last_line_of_a_host_without_an_error_file_is_shown_as_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "read_file", lambda *args: "")
    ended, killed = one("main", code=3), one("main", code=137)
    for container in (ended, killed):
        container.logs = lambda tail: b"[monarch] FAILED: \x1b[2Jhost 7\n"
    (replica,) = snapshot.add_files(build([spec("main", hosts=True)], ended)).replicas
    assert replica.failure == r"replica main/0 exited with code 3; its last output: [monarch] FAILED: \x1b[2Jhost 7"
    (replica,) = snapshot.add_files(build([spec("main", hosts=True)], killed)).replicas
    assert replica.failure == "replica main/0 was killed by signal 9 (SIGKILL)"


def test_a_host_that_must_not_be_restarted_has_ended() -> None:
    result = HostResult(78, "boom", no_retry_reason="exit code 78 asks for it", restarts=1)
    container = one("main", ended=NOW - 20)
    container.attrs["RestartCount"] = 1
    app = build([spec("main", hosts=True)], container, results={"main/0": result})
    (replica,) = app.replicas
    assert (replica.state, replica.restarts, replica.ended) == (State.FAILED, 1, NOW - 20)
    status = reduce(app)
    assert (status.state, pending_stop(app), status.error) == (State.FAILED, None, result.to_text())
    assert status.message == "replica main/0 exited with code 78; not started again: exit code 78 asks for it"


def test_a_file_that_grows_without_end_is_not_read() -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(1 << 20)
        pytest.fail("all of it was read")

    container = SimpleNamespace(get_archive=lambda path: (chunks(), {"size": 10, "mode": 0o644}))
    assert connection.read_file(cast(Any, container), "/tmp/a") == ""


def test_marker_files_are_read_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = HostResult(3, "x", no_retry_reason="w", restarts=0)
    reads: list[str] = []

    def read_file(container: SimpleNamespace, path: str) -> str:
        reads.append(container.id)
        counted = HostResult(restarts=1)  # of a host that has not ended
        return "" if path == "/tmp/a" else (result if container.id == "final/0" else counted).to_text()

    monkeypatch.setattr(snapshot, "read_file", read_file)
    found = [one("failed", code=3), one("final"), one("fine"), one("runs", "running"), one("new", "created", code=127)]
    assert snapshot.read_results(cast(Any, found)) == {"final/0": result}
    assert sorted(reads) == ["final/0", "final/0", "fine/0", "fine/0"]


def test_a_damaged_label_is_named() -> None:
    with pytest.raises(DamagedFileError, match="the label torchx-monarch/app of app-1 is damaged: "):
        build([], one("a"), record="no")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-20T10:11:12.5Z", 1795169472.5),
        ("2026-11-20T10:11:12Z", 1795169472.0),
        ("2026-11-20T11:11:12.25+01:00", 1795169472.25),
        ("0001-01-01T00:00:00Z", 0.0),
        ("", 0.0),
    ],
)
def test_times_of_dockerd(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_errors_of_the_daemon_are_for_users() -> None:
    refused = APIError("500 Server Error", explanation="no space left on device")
    for error, words in (
        (refused, "refuses a request: no space left"),
        (requests.exceptions.ConnectionError("gone"), "does not answer any more"),
    ):
        with pytest.raises(BackendError, match=words), connection.answering():
            raise error
