# SPDX-License-Identifier: BSD-3-Clause
"""monarch.spmd: what a person types after it, what it yields, and how it answers mistakes."""

from __future__ import annotations

import inspect
import logging
import re
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
from torchx_monarch.command.command import Program, parse
from torchx_monarch.command.component_arguments import (
    ComponentArgumentError,
    ComponentArguments,
    component_arguments,
    unprotected,
)
from torchx_monarch.command.spmd import app_name, role_name
from torchx_monarch.command.torchrun_options import OPTIONS, Option
from torchx_monarch.components import controller, ft, hosts, spmd
from torchx_monarch.model.role_spec import is_sidecar


def parsed(words: list[str], component: Callable[..., AppDef] = spmd) -> ComponentArguments:
    found = component_arguments(f"monarch.{component.__name__}", component, words)
    assert found is not None
    return found


def app(text: str, component: Callable[..., AppDef] = spmd) -> AppDef:
    """The app of ``torchx run monarch.COMPONENT TEXT``."""
    return materialize_appdef(component, parsed(text.split(), component).words)


def mistake(text: str, component: Callable[..., AppDef] = spmd) -> str:
    with pytest.raises(ComponentArgumentError) as caught:
        parsed(text.split(), component)
    return str(caught.value)


def role_of(text: str) -> Role:
    (role,) = app(text).roles
    return role


def refusal(text: str) -> str:
    with pytest.raises(ComponentValidationException) as caught:
        materialize_appdef(spmd, text.split())
    return str(caught.value)


def test_another_launcher_is_no_program() -> None:
    said = refusal("-j 1x8 -- accelerate launch --num_processes 8 train.py --lr 1")
    assert "type `monarch.spmd -j NODESx8 train.py --lr 1`" in said


def test_a_plain_torchrun() -> None:
    made = app("--nproc 4 train.py --lr 0.1")
    (role,) = made.roles
    assert (made.name, role.name, role.entrypoint, role.num_replicas) == ("train", "train", "torchrun", 1)
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
        *((f"{text} t.py", 1, ["1", "4"]) for text in ("--nproc-per-node 4", "--nproc_per_node=4", "-j1x4", "-j=1x4")),
        ("-j 2x4 t.py", 2, ["2", "4"]),
        ("-j 1:2x4 t.py", 2, ["1:2", "4"]),
        ("-j 4+1x8 t.py", 4, ["4", "8"]),
        ("-j 2:4+2x8 t.py", 4, ["2:4", "8"]),
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
    assert role_name(Program("module" if module else "script", target)) == name


@given(st.text())
def test_names_are_safe(text: str) -> None:
    role = role_name(Program("script", text))
    assert role.isascii() and role.isalnum() and role == role.lower() and not role[0].isdigit()
    name = app_name(text, role)
    assert name and "/" not in name and name[0] not in "-." and all(c.isascii() and c.isprintable() for c in name)


def test_names() -> None:
    made = app("--name exp/run_1 t.py")
    assert made.name == "run_1"
    assert made.roles[0].env["TORCHX_TRACKING_EXPERIMENT_NAME"] == "exp"
    assert app("--name exp/ t.py").name == "t"
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


def test_the_remaining_options_in_the_spellings_of_torchrun() -> None:
    for text in ("--max_restarts 3 --log_dir /logs --tee 0:3", "--max-restarts=3 --log-dir=/logs -t 0:3"):
        words = "--tee 0:3 --max-restarts 3 --log-dir /logs t.py"
        assert role_of(f"{text} --max-retries 1 t.py").args[6:] == words.split()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["No program to run", "train.py", "-m"]),
        ("-- --lr 1", ["--lr stands where the script is expected"]),
        ("-m a --script b.py", ["-m a and --script b.py contradict"]),
        ("-j 2y4 t.py", ["-j 2y4", "usage example"]),
        ("-j 4+1 t.py", ["NNODES+SPARESxNPROC"]),
        ("-j 0x2 t.py", ["-j 0x2", "above 0"]),
        ("--nproc 0 t.py", ["--nproc 0", "auto, gpu, cpu, xpu"]),
        ("--nproc tpu t.py", ["--nproc tpu", "auto, gpu, cpu, xpu"]),
        ("--nnodes x t.py", ["--nnodes x", "MIN:MAX"]),
        ("--nnodes 3:2 t.py", ["--nnodes 3:2", "MIN:MAX"]),
        ("--tee 7 t.py", ["--tee=7", "stdout"]),
        ("--max_restarts -1 t.py", ["--max_restarts -1", "0 or more"]),
        ("--max_retries -1 t.py", ["--max_retries -1", "0 or more"]),
        ("-h gpu.smal t.py", ["-h gpu.smal", "gpu.small"]),
        ("-h aws_t3.medium -j 2 t.py", ["-j 2", "not a GPU instance"]),
        ("--mounts src=/a,dst=/b t.py", ["--mounts", "type must be specified first"]),
        ("--mounts type=disk,src=/a,dst=/b t.py", ["--mounts", "invalid mount type"]),
        ("--mounts type=bind,src=/a t.py", ["--mounts", "dst is missing"]),
        ("--torchrun=--bogus t.py", ["torchrun has no option --bogus"]),
        ("--torchrun='a t.py", ["--torchrun 'a: No closing quotation."]),
        ("--torchrun=other.py t.py", ["--torchrun other.py: give options of torchrun alone"]),
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
        ("train.py --nproc-per-node 4 --wait", "--nproc-per-node, --wait after train.py"),
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
    assert errors == {"monarch.spmd": [], "monarch.ft": [], "monarch.hosts": [], "monarch.controller": []}
    path = inspect.getsourcefile(torchx_monarch.components)
    assert path is not None
    assert validate(path, "spmd", None) == []


@pytest.mark.parametrize("component", [spmd, ft, hosts, controller])
def test_every_option_has_a_help_text(component: Callable[..., object]) -> None:
    documented = inspect.getdoc(component)
    assert documented is not None
    for name in inspect.signature(component).parameters:
        assert f"\n    {name}: " in documented


def test_spare_nodes() -> None:
    found = [role_of(f"-j {shape}x8 a.py").metadata for shape in ("4+1", "2:4+2", "4+0", "4")]
    assert found == [*({"monarch": {"spares": spares}} for spares in (1, 2, 0)), {}]


def test_groups_are_roles_with_a_world_of_their_own() -> None:
    *groups, lighthouse = app("-j 3x8 --group-hosts 2 --min-groups 2 --max-retries 1 train.py --lr 1", ft).roles
    assert [role.name for role in groups] == ["group0", "group1", "group2"]
    second = groups[1]
    assert second.args[:4] == ["--nnodes", "2", "--nproc-per-node", "8"] and second.args[-2:] == ["--lr", "1"]
    assert second.args[second.args.index("--max-restarts") + 1] == "10"
    assert (second.num_replicas, second.max_retries, second.retry_policy.value) == (2, 1, "REPLICA")
    assert (second.env["REPLICA_GROUP_ID"], second.env["NUM_REPLICA_GROUPS"]) == ("1", "3")
    address = second.env["TORCHFT_LIGHTHOUSE"].removeprefix("http://")
    assert lighthouse.entrypoint == "torchft_lighthouse" and is_sidecar(lighthouse)
    assert lighthouse.args[:4] == ["--bind", address, "--min_replicas", "2"]
    own = app("--lighthouse http://head:29510 train.py", ft).roles
    assert len(own) == 2 and {role.env["TORCHFT_LIGHTHOUSE"] for role in own} == {"http://head:29510"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("-j 2+1x8 t.py", "-j 2+1x8: use GROUPSxNPROC"),
        ("-j 2:4x8 t.py", "-j 2:4x8: use GROUPSxNPROC"),
        ("-j 2x8 --min-groups 3 t.py", "--min_groups 3: -j 2x8 has 2 groups; use 1 to 2"),
        ("-j 2x8 --group-hosts 0 t.py", "--group_hosts 0: use a number above 0"),
        *((f"-j {j} t.py", f"-j {j}: use GROUPSxNPROC") for j in ("4", "0x1", "-1x2", "99999999x1")),
        ("--heartbeat-timeout-ms 0 t.py", "--heartbeat_timeout_ms 0: use 200 to 3600000"),
        *((f"--lighthouse {a} t.py", f"--lighthouse {a}: ") for a in ("head", "http://head", "http://head:99999")),
    ],
)
def test_wrong_groups_are_refused(text: str, part: str) -> None:
    with pytest.raises(ComponentValidationException, match=re.escape(part)):
        app(text, ft)


def program(text: str) -> Program:
    role = role_of(text)
    command = parse([role.entrypoint, *role.args])
    assert command is not None
    return command.program


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-m pkg.train --lr 0.1", Program("module", "pkg.train", ("--lr", "0.1"))),
        ("-m pkg.train --name foo", Program("module", "pkg.train", ("--name", "foo"))),
        ("-m=pkg.train --nproc 4", Program("module", "pkg.train", ("--nproc", "4"))),
        ("-mpkg.train -m x", Program("module", "pkg.train", ("-m", "x"))),
        ("--m pkg.train -h", Program("module", "pkg.train", ("-h",))),
        ("--module pkg.train --help", Program("module", "pkg.train", ("--help",))),
        ("--module=pkg.train a", Program("module", "pkg.train", ("a",))),
        ("-m pkg.train -- --lr 0.1", Program("module", "pkg.train", ("--lr", "0.1"))),
        ("-m pkg.train", Program("module", "pkg.train")),
        ("--script t.py --lr 0.1", Program("script", "t.py", ("--lr", "0.1"))),
        ("t.py --x 1 --x 1 -- -v", Program("script", "t.py", ("--x", "1", "--x", "1", "--", "-v"))),
        ("-- t.py --lr 0.1", Program("script", "t.py", ("--lr", "0.1"))),
    ],
)
def test_the_program_ends_the_options(text: str, expected: Program) -> None:
    assert program(text) == program(f"--nproc 4 --env A=1 {text}") == expected


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_of_torchrun_can_be_typed(option: Option) -> None:
    values = {"rdzv_backend": "c10d", "rdzv_conf": "timeout=1", "signals_to_handle": "SIGTERM", "module": "t.py"}
    value = values.get(option.dest, option.choices[0] if option.choices else "1")
    for flag in option.flags:
        words = [flag, value] if option.type is not bool or option.dest == "module" else [flag]
        role = materialize_appdef(spmd, parsed([*words, "t.py"]).words).roles[0]
        command = parse([role.entrypoint, *role.args])
        assert command is not None and command.program.target == "t.py"
        set_value = getattr(command.options, option.dest)
        assert set_value == (True if option.type is bool else option.convert(value, flag))


def test_further_options_of_torchrun() -> None:
    typed = role_of("--master-port 2999 --torchrun=--redirects=0:3 --no-python t.py --master-port 1").args
    assert typed[8:] == ["--redirects=0:3", "--master-port=2999", "--no-python", "t.py", "--master-port", "1"]
    assert spmd("t.py", torchrun="--log-line-prefix-template 'a b'").roles[0].args[8:10] == [
        "--log-line-prefix-template",
        "a b",
    ]


@pytest.mark.parametrize(
    ("configured", "text", "begins"),
    [
        ({"nproc": "3"}, "-j 1x2 t.py", "--nnodes 1 --nproc-per-node 2 "),
        ({"nnodes": "4"}, "-j 1x2 t.py", "--nnodes 1 --nproc-per-node 2 "),
        ({"j": "2x8"}, "--nproc 3 t.py", "--nnodes 2 --nproc-per-node 3 "),
        ({"j": "2x8", "nproc": "1"}, "--nnodes 4 t.py", "--nnodes 4 --nproc-per-node 1 "),
        ({"script": "a.py"}, "-m pkg", "--nnodes 1 --nproc-per-node 2 --role pkg --tee 3 -m pkg"),
        ({"m": "pkg"}, "--script a.py", "--nnodes 1 --nproc-per-node 2 --role a --tee 3 a.py"),
    ],
)
def test_what_is_typed_counts_and_not_what_is_configured(configured: dict[str, str], text: str, begins: str) -> None:
    (role,) = materialize_appdef(spmd, parsed(text.split()).words, configured).roles
    assert " ".join(role.args).startswith(begins)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--max-restart-s 4 t.py", "Did you mean --max_restarts?"),
        ("--lr 0.1 t.py", "has no option --lr. Options of the program come after it."),
        ("-n 4 t.py", "has no option -n."),
        ("--master-prot 1 t.py", "has no option --master-prot. Did you mean --master-port?"),
        ("--master-port", "--master-port needs a value."),
        ("-j 2x4 --nproc 4 t.py", "-j says what --nproc says: give one of them."),
        ("-cfg grace=1 t.py", "-cfg is an option of `torchx run`"),
        ("--nproc", "--nproc needs a value."),
        ("--nproc --nnodes 2 t.py", "type --nproc=--nnodes"),
        ("--nproc 2 --nproc-per-node 3 t.py", "--nproc-per-node is given twice"),
        ("--gpu x t.py", "--gpu x: give a whole number"),
        *((f"--env {text} t.py", f"--env {text}: give NAME=VALUE") for text in ("FOO", "FOO=", "A=1=2", "A=eA==")),
        ("--debug t.py", "--debug t.py: give True or False, as in --debug True"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    assert said in mistake(text)
    assert "monarch.spmd" in mistake(text) and len(mistake(text).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x2", "monarch.hosts runs no program, and '2x2' is none of its options."),
        ("--nproc-per-node 4", "as -j NNODESxNPROC"),
        ("--idle-timeout 5 --timeout 3", "monarch.hosts has no option --timeout. Did you mean --idle_timeout?"),
    ],
)
def test_mistakes_of_other_components(text: str, said: str) -> None:
    assert said in mistake(text, hosts)


def test_other_components() -> None:
    assert "600" in app("-j 2x0 --idle-timeout 600", hosts).roles[0].args
    (role,) = app("--meshes a=1 -m pkg.main --name x", controller).roles
    assert role.args[-4:] == ["-m", "pkg.main", "--name", "x"]


def test_help_is_torchx_s() -> None:
    assert component_arguments("monarch.spmd", spmd, ["--nproc", "4", "--help"]) is None


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_the_words_of_a_program_arrive_as_typed(words: list[str]) -> None:
    found = parsed(["--nproc", "4", "t.py", *words])
    assert found.options == {"nproc": "4"} and found.program == ("t.py", *words) and found.script == "t.py"
    assert found.words[0] == "--nproc=4" and unprotected(found.words[1:]) == found.program
    assert not any(word.startswith("-") for word in found.words[1:])
    role = materialize_appdef(spmd, found.words).roles[0]
    assert role.args[-len(words) - 1 :] == ["t.py", *words]


def test_the_script() -> None:
    texts = ("-m pkg a.py", "--script a.py b.py", "a.py b.py", "")
    assert [parsed(text.split()).script for text in texts] == ["", "a.py", "a.py", ""]
