# SPDX-License-Identifier: BSD-3-Clause
"""The scheduler of all backends: rewriting, options, configuration, workspaces, and the push of images."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torchx
from torchx.runner import Runner
from torchx.specs import (
    AppDef,
    BindMount,
    CfgVal,
    DeviceMount,
    InvalidRunConfigException,
    Resource,
    Role,
    VolumeMount,
)
from torchx.specs.finder import ComponentValidationException
from torchx.workspace import WorkspaceMixin
from torchx.workspace.dir_workspace import DirWorkspaceMixin

from torchx_monarch import schedulers
from torchx_monarch.backends.core.errors import SubmitError, UserError
from torchx_monarch.backends.core.options import MonarchOpts, NetworkOpts
from torchx_monarch.components import ft
from torchx_monarch.model.host_spec import FLAGS, HostSpec
from torchx_monarch.schedulers import monarch, monarch_local, monarch_slurm

_IN_IMAGES = ("monarch_docker", "monarch_kubernetes", "monarch_aws_batch")
"""The schedulers whose replicas always run in containers."""


@pytest.fixture
def runner() -> Runner:
    return Runner("torchx", {"monarch_local": monarch_local, "monarch_slurm": monarch_slurm})


@pytest.fixture
def app() -> AppDef:
    resource = Resource(cpu=1, gpu=0, memMB=1024)
    args = ["--nnodes", "2", "--nproc-per-node", "2", "train.py", "--x", 'a b"c,$d']
    trainer = Role("trainer", image="", entrypoint="torchrun", args=args, num_replicas=2, resource=resource)
    reader = Role("reader", image="", entrypoint="sh", args=["-c", "echo hello"], resource=resource)
    return AppDef("app", roles=[trainer, reader])


def test_application_is_the_users_and_request_is_wrapped(runner: Runner, app: AppDef) -> None:
    before = copy.deepcopy(app)
    info = runner.dryrun(app, "monarch_local", cfg={"grace": 7, "host_timeout": 11, "preload": "torch+numpy"})
    assert app == before
    assert info.app is not None
    assert [(role.entrypoint, role.args) for role in info.app.roles] == [
        (role.entrypoint, role.args) for role in app.roles
    ]
    request = json.dumps(asdict(info.request))
    assert "torchx_monarch.host" in request
    for words in ('"--grace", "7"', '"--host-timeout", "11"', '"--preload", "torch,numpy"'):
        assert words in request
    assert "echo hello" in request


def test_a_role_that_names_torchrun_and_has_no_hosts_is_warned_of(
    runner: Runner, app: AppDef, caplog: pytest.LogCaptureFixture
) -> None:
    app.roles[1].entrypoint, app.roles[1].args = "echo", ["--msg", "torchrun"]
    info = runner.dryrun(app, "monarch_local")
    assert "'--', 'echo', '--msg', 'torchrun']" in " ".join(str(info).split())
    (line,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("role reader names torchrun, but not as its command, and runs as it is")


def test_wraps_schedulers_that_build_workspaces(runner: Runner, app: AppDef) -> None:
    scheduler = runner._scheduler("monarch_slurm")
    assert isinstance(scheduler, WorkspaceMixin)
    assert not isinstance(runner._scheduler("monarch_local"), WorkspaceMixin)
    assert {"grace", "partition", "job_dir"} <= {name for name, _ in scheduler.run_opts()}
    app.roles.append(Role("viewer", image="", entrypoint="sh", metadata={"monarch": {"wrap": False}}))
    text = str(runner.dryrun(app, "monarch_slurm", cfg={"partition": "main"}))
    assert "--partition=main" in text
    assert text.count("torchx_monarch.host") == 2
    assert text.splitlines()[:3] == [
        "# role trainer: each replica starts a host process, which starts the ranks",
        "# role reader: each replica starts a host process, which starts the command",
        "# role viewer: each replica starts the command, without a host process: its metadata has 'wrap': False",
    ]


@pytest.mark.parametrize("name", [name for name in schedulers.NAMES if name not in _IN_IMAGES])
def test_mounts_are_named_where_nothing_is_mounted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    same, device = BindMount("/data/", "/data"), DeviceMount("/dev/kvm", "/dev/kvm")
    role = Role(
        "reader", image="", entrypoint="true", mounts=[same, BindMount("/a", "/b"), device, VolumeMount("v", "/c")]
    )
    cfg = {"hosts": ["node1"]} if name == "monarch_ssh" else {}
    with Runner("torchx", {name: getattr(schedulers, name)}) as runner:
        runner.dryrun(AppDef("app", roles=[role]), name, cfg=cfg)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert texts == [f"role 'reader': nothing is mounted at /b and /c, because {name} runs it in no container"]


def test_what_torchx_cannot_pack_is_named(runner: Runner, app: AppDef, tmp_path: Path) -> None:
    workspace = tmp_path / "code"
    workspace.mkdir()
    (workspace / "gone").symlink_to("nowhere")
    with pytest.raises(ComponentValidationException, match="code/gone: No such file.*--workspace ''"):
        runner.dryrun(app, "monarch_slurm", cfg={"job_dir": str(tmp_path / "job")}, workspace=f"file://{workspace}")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("grace", 3_000_000, "0 to 2000000"),
        ("host_timeout", 0, "1 to 1000000000"),
    ],
)
def test_senseless_seconds_are_refused(runner: Runner, app: AppDef, name: str, value: int, allowed: str) -> None:
    with pytest.raises(InvalidRunConfigException, match=f"`{name}` is {value}; it is a number of seconds, {allowed}"):
        runner.dryrun(app, "monarch_local", cfg={name: value})


def test_exit_codes_and_sizes_are_read_at_submission(runner: Runner, app: AppDef) -> None:
    cfg = runner.scheduler_run_opts("monarch_local").cfg_from_str("retry_on=1+SIGKILL,grace=7,log_limit=1.5G")
    request = runner.dryrun(app, "monarch_local", cfg=cfg).request
    words = json.dumps(asdict(request))
    assert '"--retry-on", "1,137"' in words and f'"--log-limit", "{3 << 29}"' in words
    assert "--retry-on" not in str(runner.dryrun(app, "monarch_local"))
    with pytest.raises(InvalidRunConfigException, match="`retry_on` is 1.300: '300' is no exit code.*from 1 to 255"):
        runner.dryrun(app, "monarch_local", cfg={"retry_on": "1+300"})
    for wrong in ("2g", "5", "-1G"):
        with pytest.raises(InvalidRunConfigException, match=f"`log_limit` is {wrong}: .*M"):
            runner.dryrun(app, "monarch_local", cfg={"log_limit": wrong})


def test_hosts_without_options_have_the_defaults_of_these() -> None:
    given = {option.name: option.default for option in fields(NetworkOpts) if option.name in FLAGS}
    parsed = {name: FLAGS[name].parse(str(default)) for name, default in given.items() if default != ""}
    assert parsed == {name: getattr(HostSpec, name) for name in parsed}
    assert not any(getattr(HostSpec, name) for name in given.keys() - parsed.keys())


def test_the_seed_of_a_program_draws_no_ports(runner: Runner) -> None:
    """Otherwise two programs with one seed would submit jobs whose replicas 0 listen on the same port."""
    before = random.getstate()
    request = str(runner.dryrun(ft("train.py"), "monarch_slurm"))
    assert "tls:@" in request and "torchft_lighthouse" in request
    assert random.getstate() == before


def test_bad_command_is_refused_before_anything_is_submitted(runner: Runner, app: AppDef) -> None:
    app.roles[0].args = ["--nnodes", "3", "train.py"]
    with pytest.raises(ComponentValidationException, match="role 'trainer': .*--nnodes=3"):
        runner.run(app, "monarch_local")
    assert runner.list("monarch_local") == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", "a" * 300, "role 'aaaaaaaaaaaaaaaaaaaa'…: as a folder its name has 300 bytes; it can have 255"),
        ("name", "ü" * 50, "its name has 300 bytes"),
        ("retry_policy", "ROLE", "role 'reader': its retry_policy is 'ROLE', and not RetryPolicy."),
        ("env", {"A": "a", "BIG": "b" * 131068}, "variable 'BIG' has 131,073 bytes, and a process can have none above"),
        ("args", ["c" * 131072], "role 'reader': argument 'cccccccccccccccccccccccccccccccccccccccc'… has 131,073"),
        ("args", ["x" * 99_000] * 70, "arguments and variables have 6,930,181 bytes, and a process can have 6,291,456"),
    ],
)
def test_roles_that_no_backend_takes(runner: Runner, app: AppDef, field: str, value: object, said: str) -> None:
    setattr(app.roles[1], field, value)
    with pytest.raises(UserError, match=re.escape(said)):
        runner.dryrun(app, "monarch_local")


@pytest.mark.parametrize("scheduler", ["monarch_docker", "monarch_kubernetes", "monarch_aws_batch"])
@pytest.mark.parametrize("image", ["", torchx.IMAGE, "ghcr.io/pytorch/torchx:0.7.0"])
def test_hosts_need_an_image_of_their_own(app: AppDef, scheduler: str, image: str, tmp_path: Path) -> None:
    """Asked for before the workspace is built, and without the place where jobs run."""
    cfg = {"monarch_kubernetes": {"validate_spec": False}, "monarch_aws_batch": {"queue": "main"}}
    app.roles[0].image = image
    for role in app.roles[1:]:
        role.image = torchx.IMAGE
    (tmp_path / "gone").symlink_to("nowhere")
    factories = {scheduler: getattr(schedulers, scheduler)}
    with Runner("torchx", factories) as runner, pytest.raises(UserError) as refused:
        runner.dryrun(app, scheduler, cfg=cfg.get(scheduler), workspace=f"file://{tmp_path}")
    for words in ("role 'trainer'", "--image", "docker build -f docker/Dockerfile", image):
        assert words in str(refused.value)


def test_schedulers_without_images_take_any(runner: Runner, app: AppDef) -> None:
    app.roles[0].image = torchx.IMAGE
    assert runner.dryrun(app, "monarch_local").app.roles[0].image == torchx.IMAGE


OPTIONS = MonarchOpts.from_cfg({"image_repo": "registry/a"})
LOCAL = "sha256:abc"


def built_app() -> AppDef:
    return AppDef("app", [Role("built", LOCAL), Role("other", "python:3.11")])


class Builder(WorkspaceMixin[list[str]]):  # type: ignore[misc]
    """Pushes by noting it, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.pushed: list[str] = []
        self._failure = failure

    def dryrun_push_images(self, app: AppDef, cfg: Mapping[str, CfgVal]) -> list[str]:
        return [role.image for role in app.roles]

    def push_images(self, images_to_push: list[str]) -> None:
        if self._failure is not None:
            raise self._failure
        self.pushed += images_to_push


def test_a_builder_without_a_push_step_pushes_nothing() -> None:
    for workspace in (None, DirWorkspaceMixin()):
        named = built_app()
        assert monarch.name_images(workspace, named, MonarchOpts()) is None
        assert named == built_app()
        monarch.push_images(workspace, None)


def test_images_are_pushed() -> None:
    builder = Builder()
    monarch.push_images(builder, monarch.name_images(builder, built_app(), OPTIONS))
    assert builder.pushed == [LOCAL, "python:3.11"]


@pytest.mark.parametrize("failure", [RuntimeError("denied"), OSError("no daemon")])
def test_a_refused_push_is_an_error_of_the_submission(failure: Exception) -> None:
    with pytest.raises(SubmitError, match="the image with the workspace cannot be pushed: "):
        monarch.push_images(Builder(failure), [LOCAL])
