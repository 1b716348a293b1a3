# SPDX-License-Identifier: BSD-3-Clause
"""What a person types after ``monarch.spmd``: where the options end, torchrun's spellings, and answers to mistakes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.specs import AppDef
from torchx.specs.builders import materialize_appdef

from torchx_monarch.command.command import Program, parse
from torchx_monarch.command.component_arguments import (
    ComponentArgumentError,
    ComponentArguments,
    component_arguments,
    unprotected,
)
from torchx_monarch.command.torchrun_options import OPTIONS
from torchx_monarch.components import controller, hosts, spmd


def parsed(words: list[str], component: Callable[..., AppDef] = spmd) -> ComponentArguments:
    parameters = inspect.signature(component).parameters.values()
    options = {each.name: each.annotation for each in parameters if each.kind is not each.VAR_POSITIONAL}
    found = component_arguments(f"monarch.{component.__name__}", words, options, len(options) < len(parameters))
    assert found is not None
    return found


def app(text: str, component: Callable[..., AppDef] = spmd) -> AppDef:
    """The app of ``torchx run monarch.COMPONENT TEXT``."""
    return materialize_appdef(component, parsed(text.split(), component).words)


def refusal(text: str, component: Callable[..., AppDef] = spmd) -> str:
    with pytest.raises(ComponentArgumentError) as caught:
        parsed(text.split(), component)
    return str(caught.value)


def program(text: str) -> Program:
    (role,) = app(text).roles
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


@pytest.mark.parametrize(
    "text",
    [
        *("--nproc 4", "--nproc=4", "--nproc-per-node 4", "--nproc_per_node=4", "-j 1x4", "-j1x4", "-j=1x4"),
        *("--nnodes 1 --nproc 4", "--nnodes=1:1 --nproc 4"),
    ],
)
def test_the_number_of_ranks(text: str) -> None:
    (role,) = app(f"{text} t.py").roles
    assert role.args[2:4] == ["--nproc-per-node", "4"] and role.num_replicas == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--max-restarts 3", ["--max-restarts", "3"]),
        ("--max_restarts=3", ["--max-restarts", "3"]),
        ("--log-dir d", ["--log-dir", "d"]),
        ("-t 1", ["--tee", "1"]),
    ],
)
def test_spellings_of_torchrun(text: str, words: list[str]) -> None:
    assert " ".join(words) in " ".join(app(f"{text} t.py").roles[0].args)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_of_torchrun_is_accepted_or_named(option: object) -> None:
    for flag in option.flags:  # type: ignore[attr-defined]
        try:
            parsed([f"{flag}=1", "t.py"])
        except ComponentArgumentError as error:
            said = str(error)
            assert flag in said and any(words in said for words in ("--env PET_", "leave ", "utils.sh torchrun")), said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--nprocs 4 t.py", "has no option --nprocs. Did you mean --nproc?"),
        ("--max-restart-s 4 t.py", "Did you mean --max_restarts?"),
        ("--lr 0.1 t.py", "has no option --lr. Options of the program come after it."),
        ("-n 4 t.py", "has no option -n."),
        ("--max 3 t.py", "--max may mean --max_restarts or --max_retries"),
        ("--standalone t.py", "leave --standalone out: the hosts of each job find each other"),
        ("--rdzv-backend c10d t.py", "leave --rdzv-backend out: the hosts of the job find each other"),
        ("--role trainer t.py", "leave --role out: the role is named after the program"),
        ("--workspace . t.py", "--workspace is an option of `torchx run`: type it before monarch.spmd."),
        ("-cfg grace=1 t.py", "-cfg is an option of `torchx run`"),
        ("--log t.py", "--log is an option of `torchx run`"),
        ("--nproc", "--nproc needs a value."),
        ("--nproc --nnodes 2 t.py", "type --nproc=--nnodes"),
        ("--nproc 2 --nproc-per-node 3 t.py", "--nproc-per-node is given twice"),
        ("--gpu x t.py", "--gpu x: give a whole number"),
        *((f"--env {text} t.py", f"--env {text}: give NAME=VALUE") for text in ("FOO", "FOO=", "A=1=2", "A=eA==")),
        ("--debug t.py", "--debug t.py: give True or False, as in --debug True"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    assert said in refusal(text)
    assert "monarch.spmd" in refusal(text) and len(refusal(text).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x2", "monarch.hosts runs no program, and '2x2' is none of its options."),
        ("--nproc-per-node 4", "as -j NNODESxNPROC"),
        ("--idle 5 --timeout 3", "monarch.hosts has no option --timeout. Did you mean --idle_timeout?"),
    ],
)
def test_mistakes_of_other_components(text: str, said: str) -> None:
    assert said in refusal(text, hosts)


def test_other_components() -> None:
    assert "600" in app("-j 2x0 --idle-timeout 600", hosts).roles[0].args
    (role,) = app("--meshes a=1 -m pkg.main --name x", controller).roles
    assert role.args[-4:] == ["-m", "pkg.main", "--name", "x"]


def test_help_is_torchx_s() -> None:
    assert component_arguments("monarch.spmd", ["--nproc", "4", "--help"], {"nproc": str}, program=True) is None


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_the_words_of_a_program_arrive_as_typed(words: list[str]) -> None:
    found = parsed(["--nproc", "4", "t.py", *words])
    assert found.options == {"nproc": "4"} and found.program == ("t.py", *words) and found.script == "t.py"
    assert found.words[0] == "--nproc=4" and unprotected(found.words[1:]) == found.program
    assert not any(word.startswith("-") for word in found.words[1:])
    role = materialize_appdef(spmd, found.words).roles[0]
    assert role.args[-len(words) - 1 :] == ["t.py", *words]


@pytest.mark.parametrize(
    ("text", "script"), [("-m pkg a.py", ""), ("--script a.py b.py", "a.py"), ("a.py b.py", "a.py"), ("", "")]
)
def test_the_script(text: str, script: str) -> None:
    assert parsed(text.split()).script == script
