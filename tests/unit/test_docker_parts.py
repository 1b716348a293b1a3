# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""monarch_docker without a daemon: the request, what containers' states mean, an app as one word."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, BindMount, InvalidRunConfigException, Resource, RetryPolicy, Role

from torchx_monarch.backends import appdef_codec
from torchx_monarch.backends.docker import request, status
from torchx_monarch.backends.docker.status import DockerReplica, DockerRole, evaluate
from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.backends.protocols import PLACEHOLDER
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


def test_hosts_meet_at_replica_0_of_their_own_role(runner: Runner) -> None:
    made = containers(runner, trainer("first"), trainer("Second_one"), rendezvous_port=20100)
    names = [container["kwargs"]["name"] for container in made]
    assert [name.partition("-")[2].partition("-")[2] for name in names] == [
        "first-0",
        "first-1",
        "second-one-0",
        "second-one-1",
    ]
    for container, role in zip(made, (0, 0, 1, 1), strict=True):
        assert f"tls:@MONARCH_REPLICA0_{role}:{20100 + role}" in container["command"]
        assert container["kwargs"]["hostname"] == container["kwargs"]["name"]
        env = container["kwargs"]["environment"]
        assert (env["MONARCH_REPLICA0_0"], env["MONARCH_REPLICA0_1"]) == (names[0], names[2])
    assert {container["kwargs"]["environment"]["TORCHX_RANK0_HOST"] for container in made} == {names[0]}


@pytest.mark.parametrize("app", ["a" * 80, "-_-App.1", "name with blanks/and ümlauts"])
@pytest.mark.parametrize("roles", [("r",), ("x" * 70 + "a", "x" * 70 + "b"), ("A_b", "a-b"), ("--",), ("a..b", "..")])
def test_names_are_valid_and_differ(app: str, roles: tuple[str, ...]) -> None:
    found = request.host_names(f"{app}-x1y2z3", {role: 1001 for role in roles})
    names = [name for each in found.values() for name in each]
    assert len(set(names)) == 1001 * len(roles)
    for name in names:
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name), name


def test_dry_run_shows_no_secret(runner: Runner) -> None:
    role = Role("reader", "image", entrypoint="sh", args=["-c", "true"])
    mounts = [BindMount("/a", "/b")]
    info = runner.dryrun(AppDef("app", [trainer(mounts=mounts, gpu=1), role]), "monarch_docker")
    first, _, reader = (container.kwargs["environment"] for container in info.request.containers)
    assert first["MONARCH_CREDENTIALS"] == PLACEHOLDER
    assert "MONARCH_CREDENTIALS" not in reader
    assert "BEGIN" not in str(info) and "BEGIN" not in json.dumps(asdict(info.request))


def test_what_names_another_job_is_not_copied(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_CREDENTIALS", "of the job that this is submitted from")
    monkeypatch.setenv("MONARCH_RUN_DIR", "/theirs")
    monkeypatch.setenv("MONARCH_MINE", "kept")
    role = Role("reader", "image", entrypoint="sh", env={"MONARCH_LOG_DIR": "/logs"})
    (made,) = containers(runner, role, copy_env=["MONARCH_*"])
    env = made["kwargs"]["environment"]
    assert "MONARCH_CREDENTIALS" not in env and "MONARCH_RUN_DIR" not in env
    assert (env["MONARCH_MINE"], env["MONARCH_LOG_DIR"]) == ("kept", "/logs")
    assert env["MONARCH_EVENTS"] == "/logs/events.jsonl"


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
        return [each["DeviceIDs"] or each["Count"] for each in requests]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert devices(2) == [["4", "5"], ["6", "7"]]
    assert devices(1) == [2]  # dockerd chooses
    assert devices(3) == [2, 2, 2]


@pytest.mark.parametrize(
    ("roles", "cfg", "words"),
    [
        ((trainer("a"), trainer("a")), {}, "two roles of app 'app' are called 'a'"),
        ((trainer(),), {"grace": -1}, "grace"),
        ((trainer(),), {"rendezvous_port": 70000}, "rendezvous_port"),
        ((trainer(),), {"init_": True}, "init_.*init"),
    ],
)
def test_senseless_requests_are_refused(
    runner: Runner, roles: tuple[Role, ...], cfg: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, InvalidRunConfigException), match=words):
        containers(runner, *roles, **cfg)


# -- states

NOW = 1_000_000.0


def one(role: str, status: str = "exited", code: int = 0, ended: float = NOW - 100, id: int = 0) -> DockerReplica:
    return DockerReplica(role, id, f"{role}-{id}", status, code, NOW - 200, ended, 0, False, "", 0, {})


def facts_of(*replicas: DockerReplica, size: int = 1, fewest: int | None = None, removed: bool = False) -> DockerRole:
    size = max(size, len(replicas))
    policy = RolePolicy(size, fewest, sidecar=any(each.role == "sidecar" for each in replicas))
    describe_removed = frozenset(range(size)) - {each.id for each in replicas} if removed else frozenset()
    return DockerRole(policy, replicas, describe_removed)


RUNS = one("main", "running")


@pytest.mark.parametrize(
    ("main", "other", "cancelled", "state", "needs_stop"),
    [
        (one("main", "created"), one("o", "created"), 0, AppState.PENDING, False),
        (one("main", "restarting"), one("o", "created"), 0, AppState.PENDING, False),
        (RUNS, one("o", "created"), 0, AppState.RUNNING, False),
        (RUNS, one("o"), 0, AppState.RUNNING, False),
        (one("main"), one("o"), 0, AppState.SUCCEEDED, False),
        (one("main"), one("o", "running"), 0, AppState.RUNNING, False),
        (one("main"), one("o", code=143, ended=NOW - 90), 0, AppState.FAILED, False),
        (one("main"), one("sidecar", "running"), 0, AppState.RUNNING, True),
        (one("main"), one("sidecar", code=143, ended=NOW - 90), 0, AppState.SUCCEEDED, False),
        (one("main"), one("sidecar", code=1, ended=NOW - 110), 0, AppState.FAILED, False),
        (one("main"), one("o", code=1, ended=NOW - 110), 0, AppState.FAILED, False),
        (RUNS, one("o", code=1, ended=NOW - 1), 0, AppState.RUNNING, False),  # main may be about to end
        (RUNS, one("o", code=1, ended=NOW - 10), 0, AppState.RUNNING, True),
        (one("main", code=143), one("o", code=143), NOW - 110, AppState.CANCELLED, False),
        (one("main", code=143), one("o", "running"), NOW - 10, AppState.RUNNING, False),  # they have their grace
        (one("main", code=143), one("o", "running"), NOW - 100, AppState.RUNNING, True),  # who cancelled is gone
        (one("main", "created"), one("o", "created"), NOW - 1, AppState.CANCELLED, False),
        (one("main"), one("o"), NOW - 99, AppState.SUCCEEDED, False),  # too late
    ],
)
def test_standing(
    main: DockerReplica, other: DockerReplica, cancelled: float, state: AppState, needs_stop: bool
) -> None:
    found = evaluate([facts_of(main), facts_of(other)], cancelled, NOW, grace=30)
    assert (found.state, found.needs_stop) == (state, needs_stop)


@pytest.mark.parametrize(
    ("main", "other", "size", "lost", "state", "needs_stop"),
    [
        ([RUNS], [], 1, True, AppState.RUNNING, True),  # hosts wait in vain for the one that is gone
        ([], [one("o", "running")], 1, False, AppState.RUNNING, False),  # perhaps it had ended, and was cleared away
        ([], [one("o")], 1, False, AppState.FAILED, False),
        ([one("main", code=143)], [], 1, True, AppState.FAILED, False),
        ([one("main")], [one("o")], 2, False, AppState.SUCCEEDED, False),  # others of theirs were removed later
    ],
)
def test_standing_without_some_containers(
    main: list[DockerReplica], other: list[DockerReplica], size: int, lost: bool, state: AppState, needs_stop: bool
) -> None:
    roles = [facts_of(*each, size=size, removed=lost) for each in (main, other)]
    found = evaluate(roles, 0, NOW, grace=30)
    assert (found.state, found.needs_stop, found.cause) == (state, needs_stop, None)


@pytest.mark.parametrize(
    ("codes", "removed", "state", "needs_stop"),
    [
        ((0, 1, 0), False, AppState.SUCCEEDED, False),
        ((None, 1, None), False, AppState.RUNNING, False),
        ((None, 1, 1), False, AppState.RUNNING, True),
        ((1, 0, 0), False, AppState.FAILED, False),
        ((None, None), True, AppState.RUNNING, False),
        ((None, 1), True, AppState.RUNNING, True),
    ],
)
def test_an_elastic_role_does_without_some(
    codes: tuple[int | None, ...], removed: bool, state: AppState, needs_stop: bool
) -> None:
    """Three replicas of which two are enough, replica 0 among them; None for one that runs."""
    replicas = [
        one("main", "running", id=k) if code is None else one("main", code=code, id=k) for k, code in enumerate(codes)
    ]
    found = evaluate([facts_of(*replicas, size=3, fewest=2, removed=removed)], 0, NOW, grace=30)
    assert (found.state, found.needs_stop) == (state, needs_stop)


def test_the_first_to_fail_is_the_cause() -> None:
    first, second = one("main", code=137, ended=NOW - 50, id=1), one("main", code=1, ended=NOW - 49)
    found = evaluate([facts_of(second, first)], 0, NOW, grace=30)
    assert found.cause == first
    assert first.failure == "replica main/1 was killed by signal 9 (SIGKILL)"
    assert second.failure == "replica main/0 exited with code 1"
    starved = dataclasses.replace(first, out_of_memory=True, memory=512 << 20)
    assert starved.failure.endswith("of which it had 512 MB (memMB)")


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
    assert status.seconds(text) == expected


# -- an app as one word


def test_blob_gives_back_the_app() -> None:
    mount = BindMount("/a b", "/c", read_only=True)
    role = trainer(env={"A": "x,y\n'\"ü"}, max_retries=2, retry_policy=RetryPolicy.REPLICA, mounts=[mount])
    app = AppDef("näme", [role, Role("other", "")], {"team": "a b"})
    packed = appdef_codec.pack(app)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)
    assert appdef_codec.unpack(packed) == app
    assert appdef_codec.unpack(packed[:-8]) is None
    assert appdef_codec.unpack("no") is None


# -- without a daemon


@pytest.mark.parametrize("words", [["status", "monarch_docker://torchx/app-1"], ["list", "-s", "monarch_docker"]])
def test_without_a_daemon_a_person_is_told_what_to_do(words: list[str]) -> None:
    environ = {**os.environ, "DOCKER_HOST": "unix:///nonexistent", "TORCHX_PLUGINS_SOURCE": "1"}
    code = "import sys; sys.argv[0] = 'torchx'; from torchx.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *words], env=environ, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "there is no Docker daemon at unix:///nonexistent" in done.stderr
    assert "systemctl start docker" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_client_a_person_is_told_what_to_install() -> None:
    code = """
import sys
sys.modules["docker"] = None
from torchx_monarch.schedulers import monarch_docker
try:
    monarch_docker("x")
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert "pip install 'docker>=7'" in done.stdout
