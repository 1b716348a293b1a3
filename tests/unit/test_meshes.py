# SPDX-License-Identifier: BSD-3-Clause
"""Apps whose hosts wait for actors: monarch.controller, MonarchJob's rewriting, and the command that says so."""

from __future__ import annotations

import copy

import pytest
from torchx.specs import AppDef, Role
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.command.allocation_spec import parse_script, script_command
from torchx_monarch.command.command import CommandError, parse
from torchx_monarch.command.meshes import app_of_meshes, check_mesh_name, waiting
from torchx_monarch.command.rewrite import WrapOptions, rewrite
from torchx_monarch.components import controller
from torchx_monarch.model.role_spec import WorkloadKind

HOSTS = ["python", "-m", "torchx_monarch.hosts"]


def typed(text: str) -> AppDef:
    """The app of ``torchx run monarch.controller TEXT``."""
    return materialize_appdef(controller, text.split())


def test_a_controller_is_a_role_for_each_mesh() -> None:
    app = typed("--meshes trainers=4,loaders=2 --gpu 8 --env A=b -m pkg.main -- --lr 0.1")
    assert [(role.name, role.num_replicas, role.resource.gpu, role.env["A"]) for role in app.roles] == [
        ("trainers", 4, 8, "b"),
        ("loaders", 2, 8, "b"),
    ]
    first, second = ([role.entrypoint, *role.args] for role in app.roles)
    assert first == script_command(("python", "-m", "pkg.main", "--lr", "0.1"))
    assert second == [*HOSTS, "--idle-timeout", "0", "--nproc", "0", "--end-with-mesh"]
    assert [role.name for role in typed("main.py").roles] == ["hosts"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "No program to run"),
        ("--meshes a=0 main.py", "--meshes a=0: use a number of hosts above 0."),
        ("--meshes a=two main.py", "--meshes a=two: use a number of hosts above 0."),
        ("--meshes my-mesh=1 main.py", "role 'my-mesh' cannot be a mesh: its hosts are `state().NAME`"),
    ],
)
def test_a_controller_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ComponentValidationException) as caught:
        typed(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["my-trainer", "2nd", "class", "", "_hosts", "admin_url", "query_engine"])
def test_names_that_cannot_be_meshes(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a mesh"):
        check_mesh_name(name)


def test_the_app_stays_as_it_is_and_its_commands_are_not_run() -> None:
    app = AppDef("app", [Role("a", image="i", entrypoint="torchrun", args=["t.py"], num_replicas=3, env={"X": "y"})])
    before = copy.deepcopy(app)
    (role,) = waiting(app, 60.0).roles
    assert app == before
    assert [role.entrypoint, *role.args] == [*HOSTS, "--idle-timeout", "60", "--nproc", "0", "--end-with-mesh"]
    assert (role.num_replicas, role.env, role.image) == (3, {"X": "y"}, "i")


def test_an_app_of_meshes() -> None:
    app = app_of_meshes({"trainers": 2, "loaders": 1})
    assert [(role.name, role.num_replicas) for role in app.roles] == [("trainers", 2), ("loaders", 1)]
    with pytest.raises(ValueError, match="mesh 'a' is to have 0 hosts; it needs 1 or more"):
        app_of_meshes({"a": 0})
    with pytest.raises(ValueError, match="has no role"):
        waiting(AppDef("empty", []), 0.0)


def test_a_script_knows_where_the_hosts_of_other_roles_meet() -> None:
    meet = {"a": "tls:@A:1", "b": "tls:@B:2"}
    app = waiting(app_of_meshes({"a": 1, "b": 1}), 0.0, ("python", "main.py"))
    app.roles.append(Role("logger", image="", entrypoint="sh", args=["-c", "true"]))
    found = rewrite(app, WrapOptions(rendezvous={**meet, "logger": "tls:@C:3"}))
    first, second, _ = found.app.roles
    assert first.args[first.args.index("--peers") + 1] == "b=tls:@B:2"
    assert "--peers" not in second.args
    assert [spec.workload for spec in found.roles] == [WorkloadKind.RANKS, WorkloadKind.SESSION, WorkloadKind.NONE]
    assert [spec.rendezvous for spec in found.roles] == [*meet.values(), ""]
    ranks = AppDef("ranks", [Role("a", image="", entrypoint="torchrun", args=["t.py"], num_replicas=1)])
    assert "--peers" not in rewrite(ranks, WrapOptions(rendezvous=meet)).app.roles[0].args


def test_the_command_is_read_as_it_is_written() -> None:
    command = parse(script_command(("python", "-u", "main.py", "--x", "--")))
    assert command is not None and command.kind == "actors"
    script = parse_script(command, {})
    assert (script.program.target, script.program.args) == ("main.py", ("--x", "--"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "takes `-- python SCRIPT`, not 'nothing'"),
        (("--wait",), "takes `-- python SCRIPT`, not '--wait'"),
        (("--",), "takes `-- python SCRIPT`, not '--'"),
        (("--", "torchrun", "t.py"), "'torchrun t.py' is no command of the form `python SCRIPT`"),
        (("--", "sh", "-c", "x"), "'sh -c x' is no command of the form"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(words: tuple[str, ...], says: str) -> None:
    command = parse(["python", "-m", "torchx_monarch.actors", *words])
    assert command is not None
    with pytest.raises(CommandError) as caught:
        parse_script(command, {})
    assert says in str(caught.value)
