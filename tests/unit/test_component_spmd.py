# SPDX-License-Identifier: BSD-3-Clause
"""monarch.spmd: what it yields, and how it answers mistakes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.components import dist
from torchx.specs import AppDef, BindMount, Role
from torchx.specs.builders import materialize_appdef
from torchx.specs.file_linter import validate
from torchx.specs.finder import ComponentValidationException, ModuleComponentsFinder

import torchx_monarch.components
from torchx_monarch.command.spmd import Launch, app_name
from torchx_monarch.components import controller, hosts, spmd


def typed(text: str) -> AppDef:
    """The app of ``torchx run monarch.spmd TEXT``."""
    return materialize_appdef(spmd, text.split())


def role_of(text: str) -> Role:
    (role,) = typed(text).roles
    return role


def refusal(text: str) -> str:
    with pytest.raises(ComponentValidationException) as caught:
        typed(text)
    return str(caught.value)


def test_a_plain_torchrun() -> None:
    app = typed("--nproc 4 train.py --lr 0.1")
    (role,) = app.roles
    assert (app.name, role.name, role.entrypoint, role.num_replicas) == ("train", "train", "torchrun", 1)
    assert role.args == [
        *("--nnodes", "1", "--nproc-per-node", "4", "--role", "train", "--tee", "3"),
        *("train.py", "--lr", "0.1"),
    ]


@pytest.mark.parametrize(
    ("text", "replicas", "shape"),
    [
        ("t.py", 1, ["1", "2"]),
        ("--nproc gpu t.py", 1, ["1", "gpu"]),
        ("--nnodes 2 t.py", 2, ["2", "2"]),
        ("--nnodes 2 --nproc auto t.py", 2, ["2", "auto"]),
        ("--nnodes 2:4 t.py", 4, ["2:4", "2"]),
        ("-j 3 t.py", 1, ["1", "3"]),
        ("-j 2x4 t.py", 2, ["2", "4"]),
        ("-j 1:2x4 t.py", 2, ["1:2", "4"]),
        ("-j 2x4 --nproc 4 --nnodes 2 t.py", 2, ["2", "4"]),
        ("-h aws_p4d.24xlarge -j 2 t.py", 2, ["2", "8"]),
        ("-h aws_t3.medium -j 2x2 t.py", 2, ["2", "2"]),
    ],
)
def test_shape(text: str, replicas: int, shape: Sequence[str]) -> None:
    role = role_of(text)
    assert (role.num_replicas, [role.args[1], role.args[3]]) == (replicas, shape)


@pytest.mark.parametrize(
    ("target", "module", "name"),
    [
        ("my-train.py", False, "mytrain"),
        ("/a/b.c/Train_01.py", False, "train01"),
        ("01_train.py", False, "train"),
        ("123.py", False, "spmd"),
        ("später.py", False, "spter"),
        ("..", False, "spmd"),
        ("pkg.sub.My_Mod", True, "mymod"),
    ],
)
def test_role_names_suit_every_backend(target: str, module: bool, name: str) -> None:
    assert Launch(target, (), module).role == name


@given(st.text())
def test_names_are_safe(text: str) -> None:
    role = Launch(text, (), False).role
    assert role.isascii() and role.isalnum() and role == role.lower() and not role[0].isdigit()
    name = app_name(text, role)
    assert name and "/" not in name and name[0] not in "-." and all(c.isascii() and c.isprintable() for c in name)


def test_names() -> None:
    app = typed("--name exp/run_1 t.py")
    assert app.name == "run_1"
    assert app.roles[0].env["TORCHX_TRACKING_EXPERIMENT_NAME"] == "exp"
    assert typed("--name exp/ t.py").name == "t"
    assert spmd("a b.py").name == "a-b"


def test_it_agrees_with_dist_torchrun() -> None:
    """Environment, metadata, resources, mounts and retries: all that is not the command, except LOGLEVEL.

    TorchX's component sets it to WARNING; torchrun itself does not.
    """
    shared: dict[str, Any] = {
        "image": "img",
        "name": "exp/run",
        "j": "2x4",
        "cpu": 3,
        "gpu": 1,
        "memMB": 5,
        "env": {"A": "x"},
        "metadata": {"M": "y"},
        "mounts": ["type=bind", "src=/a", "dst=/b"],
        "max_retries": 2,
        "debug": True,
    }
    ours, theirs = spmd("train.py", **shared), dist.torchrun(script="train.py", **shared)
    (our_role,), (their_role,) = ours.roles, theirs.roles
    assert our_role.mounts == [BindMount(src_path="/a", dst_path="/b")]
    del their_role.env["LOGLEVEL"]
    our_role.entrypoint, our_role.args, our_role.port_map = (
        their_role.entrypoint,
        their_role.args,
        their_role.port_map,
    )
    assert ours == theirs
    assert shared["env"] == {"A": "x"} and shared["metadata"] == {"M": "y"}


def test_the_remaining_options() -> None:
    args = role_of("--max_restarts 3 --log_dir /logs --tee 0:3 --max_retries 1 t.py").args
    assert args[6:] == ["--tee", "0:3", "--max-restarts", "3", "--log-dir", "/logs", "t.py"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["No program to run", "train.py", "-m"]),
        ("-- --lr 1", ["--lr stands where the script is expected"]),
        ("-m a --script b.py", ["-m a and --script b.py contradict"]),
        ("-j 2x4 --nproc 2 t.py", ["--nproc 2 contradicts -j 2x4, which means --nproc 4"]),
        ("-j 2x4 --nnodes 1 t.py", ["--nnodes 1 contradicts -j 2x4, which means --nnodes 2"]),
        ("-j 2y4 t.py", ["-j 2y4", "usage example"]),
        ("-j 0x2 t.py", ["--nnodes 0", "above 0"]),
        ("--nproc 0 t.py", ["--nproc 0", "auto, gpu, cpu, xpu"]),
        ("--nproc tpu t.py", ["--nproc tpu", "auto, gpu, cpu, xpu"]),
        ("--nnodes x t.py", ["--nnodes x", "MIN:MAX"]),
        ("--nnodes 3:2 t.py", ["--nnodes 3:2", "MIN:MAX"]),
        ("--tee 7 t.py", ["--tee 7", "stdout"]),
        ("--max_restarts -1 t.py", ["--max_restarts -1", "0 or more"]),
        ("--max_retries -1 t.py", ["--max_retries -1", "0 or more"]),
        ("-h gpu.smal t.py", ["-h gpu.smal", "gpu.small"]),
        ("-h aws_t3.medium -j 2 t.py", ["-j 2", "not a GPU instance"]),
        ("--mounts src=/a,dst=/b t.py", ["--mounts", "type must be specified first"]),
        ("--mounts type=disk,src=/a,dst=/b t.py", ["--mounts", "invalid mount type"]),
        ("--mounts type=bind,src=/a t.py", ["--mounts", "dst"]),
    ],
)
def test_a_mistake_is_answered_without_a_traceback(text: str, parts: Sequence[str]) -> None:
    message = refusal(text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("train.py --nproc 4", "--nproc after train.py"),
        ("train.py --nproc=4 -j 2x2 --lr 1", "--nproc, -j after train.py"),
        ("-m pkg.mod x --nnodes 2", "--nnodes after pkg.mod"),
    ],
)
def test_a_component_option_after_the_script_is_warned_about(
    text: str, flags: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchx_monarch"):
        role = role_of(text)
    assert role.args[-1] == text.split()[-1]
    (record,) = caplog.records
    assert record.name == "torchx_monarch" and flags in record.getMessage()


def test_torchx_finds_exactly_the_components() -> None:
    found = ModuleComponentsFinder(torchx_monarch.components, "monarch").find(None)
    errors = {component.name: component.validation_errors for component in found}
    assert errors == {"monarch.spmd": [], "monarch.hosts": [], "monarch.controller": []}
    path = inspect.getsourcefile(torchx_monarch.components)
    assert path is not None
    assert validate(path, "spmd", None) == []


@pytest.mark.parametrize("component", [spmd, hosts, controller])
def test_every_option_has_a_help_text(component: Callable[..., object]) -> None:
    documented = inspect.getdoc(component)
    assert documented is not None
    for name in inspect.signature(component).parameters:
        assert f"\n    {name}: " in documented


@pytest.mark.parametrize(
    ("text", "nnodes", "replicas", "metadata"),
    [
        ("-j 4+1x8 a.py", "4", 4, {"monarch": {"spares": 1}}),
        ("-j 2:4+2x8 a.py", "2:4", 4, {"monarch": {"spares": 2}}),
        ("-j 4+0x8 a.py", "4", 4, {"monarch": {"spares": 0}}),
        ("-j 4x8 a.py", "4", 4, {}),
    ],
)
def test_spare_nodes(text: str, nnodes: str, replicas: int, metadata: dict[str, object]) -> None:
    role = role_of(text)
    assert (role.args[1], role.num_replicas, role.metadata) == (nnodes, replicas, metadata)
    assert "NNODES+SPARESxNPROC" in refusal("-j 4+1 a.py")
