# SPDX-License-Identifier: BSD-3-Clause
"""Apps whose hosts wait, for actors or for runs, and the commands that say so."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from torchx.specs import AppDef, RetryPolicy, Role
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.client.serve import command_app
from torchx_monarch.command.allocation_spec import (
    AllocationSpec,
    parse_script,
    run_command,
    script_command,
    with_program,
)
from torchx_monarch.command.allocations import app_of_meshes, check_mesh_name, hold_for_clients, hold_for_runs
from torchx_monarch.command.command import Command, CommandError, Program, parse
from torchx_monarch.command.rank_command import find_rank_command
from torchx_monarch.command.rewrite import WrapOptions, rewrite
from torchx_monarch.components import controller, hosts
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
        *((f"--meshes a={n} main.py", f"--meshes a={n}: use a number of hosts above 0.") for n in ("two", "²", "-1")),
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
    (role,) = hold_for_clients(app, 60.0).roles
    assert app == before
    assert [role.entrypoint, *role.args] == [*HOSTS, "--idle-timeout", "60", "--nproc", "0", "--end-with-mesh"]
    assert (role.num_replicas, role.env, role.image) == (3, {"X": "y"}, "i")


def test_an_app_of_meshes() -> None:
    app = app_of_meshes({"trainers": 2, "loaders": 1})
    assert [(role.name, role.num_replicas) for role in app.roles] == [("trainers", 2), ("loaders", 1)]
    with pytest.raises(ValueError, match="mesh 'a' is to have 0 hosts; it needs 1 or more"):
        app_of_meshes({"a": 0})
    with pytest.raises(ValueError, match="has no role"):
        hold_for_clients(AppDef("empty", []), 0.0)


def test_a_script_knows_where_the_hosts_of_other_roles_meet() -> None:
    meet = {"a": "tls:@A:1", "b": "tls:@B:2"}
    app = hold_for_clients(app_of_meshes({"a": 1, "b": 1}), 0.0, ("python", "main.py"))
    app.roles.append(Role("logger", image="", entrypoint="sh", args=["-c", "true"]))
    found = rewrite(app, WrapOptions(rendezvous={**meet, "logger": "tls:@C:3"}))
    first, second, _ = found.app.roles
    assert first.args[first.args.index("--peers") + 1] == "b=tls:@B:2"
    assert "--peers" not in second.args
    assert [spec.workload for spec in found.roles] == [
        WorkloadKind.RANKS,
        WorkloadKind.ALLOCATION,
        WorkloadKind.COMMAND,
    ]
    assert [spec.rendezvous for spec in found.roles] == [*meet.values(), "tls:@C:3"]
    ranks = AppDef("ranks", [Role("a", image="", entrypoint="torchrun", args=["t.py"], num_replicas=1)])
    assert "--peers" not in rewrite(ranks, WrapOptions(rendezvous=meet)).app.roles[0].args


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


WAITS = ["python", "-m", "torchx_monarch.hosts", "--idle-timeout", "60", "--"]
PROLOGUE = "export A=1; "


def role(entrypoint: str, *args: str, replicas: int = 1) -> Role:
    return Role("trainer", image="", entrypoint=entrypoint, args=list(args), num_replicas=replicas)


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (["torchrun", "--tee", "3", "x.py", "$${V}"], [*WAITS, "torchrun", "--tee", "3", "x.py", "$${V}"]),
        (["python", "x.py"], [*WAITS, "python", "x.py"]),
        *(
            (["workspace/entrypoint.sh", *command], ["workspace/entrypoint.sh", *WAITS, *command])
            for command in (["torchrun", "x.py"], ["python3", "x.py"], ["torch.distributed.run", "x.py"])
        ),
        (["bash", "-c", f"{PROLOGUE}torchrun x.py"], ["bash", "-c", f"{PROLOGUE}{' '.join(WAITS)} torchrun x.py"]),
        ([*WAITS[:5], "--", "torchrun", "x.py"], [*WAITS[:5], "--", "torchrun", "x.py"]),
        (["python", "-m", "torchx_monarch.hosts"], ["python", "-m", "torchx_monarch.hosts"]),
    ],
)
def test_holds_a_copy_that_is_wrapped_and_described_like_any_command(given: list[str], held: list[str]) -> None:
    app = AppDef("app", [role(*given), Role("side", image="", entrypoint="sleep", args=["1"])])
    before = copy.deepcopy(app)
    result = hold_for_runs(app, 60.0)
    assert app == before
    assert [result.roles[0].entrypoint, *result.roles[0].args] == held
    assert result.roles[1] == dataclasses.replace(app.roles[1], metadata={"monarch": {"sidecar": True}})
    wrapped = rewrite(result, WrapOptions())
    assert "torchx_monarch.host" in " ".join(wrapped.app.roles[0].args)
    assert [spec.workload for spec in wrapped.roles] == [WorkloadKind.ALLOCATION, WorkloadKind.NONE]


def test_refuses_to_hold_what_runs_no_ranks() -> None:
    with pytest.raises(CommandError, match="no role of app 'app' runs a torchrun or Python command; .*: 'trainer'"):
        hold_for_runs(AppDef("app", [role("sleep", "1")]))
    with pytest.raises(CommandError, match="role 'trainer': torchrun has no option --nosuch"):
        hold_for_runs(AppDef("app", [role("torchrun", "--nosuch", "x.py")]))


@pytest.mark.parametrize(
    ("command", "hosts"),
    [
        ("torchrun --nnodes 1:3 train.py", 3),
        ("timeout 30 torchrun --nnodes 2 train.py", 2),
        (["bash", "-c", "source env.sh; torchrun --nnodes 2 train.py"], 2),
        (["workspace/entrypoint.sh", "python", "-m", "train"], 1),
        (["torch.distributed.run", "--nproc-per-node", "2", "train.py"], 1),
    ],
)
def test_a_command_gets_as_many_hosts_as_it_names(command: str | list[str], hosts: int) -> None:
    app = command_app(command, "name")
    assert (app.name, [role.num_replicas for role in app.roles]) == ("name", [hosts])
    hold_for_runs(app)


def test_messages_about_a_command_name_no_role() -> None:
    for command, why in (
        ("torchrun --nosuch x.py", "torchrun has no option --nosuch"),
        ("torchrun --nproc-per-node x x.py", "torchrun option --nproc-per-node=x is not a number"),
    ):
        with pytest.raises(CommandError, match=f"^{why}"):
            command_app(command)


def of(*words: str, replicas: int = 2) -> AllocationSpec:
    command = parse(["python", "-m", "torchx_monarch.hosts", *words])
    assert command is not None and command.kind == "hosts"
    return AllocationSpec.from_command(command, {}, replicas)


def test_what_its_command_says() -> None:
    assert of() == AllocationSpec(1800.0, "1", (), None)
    assert of("--nproc", "0", "--idle-timeout", "0") == AllocationSpec(0.0, "0", (), None)
    held = of("--idle-timeout", "5.5", "--", "torchrun", "--nnodes", "2", "--nproc-per-node", "gpu", "x.py", "-a")
    assert (held.idle_timeout, held.nproc, held.words[0]) == (5.5, "gpu", "torchrun")
    assert held.command is not None and held.command.program == Program("script", "x.py", ("-a",))
    for words, why in (
        (["--idle-timeout", "-1"], "--idle-timeout -1: give seconds, or 0 for never"),
        (["--idle-timeout", "x"], "invalid float value"),
        (["--nproc", "many"], "--nproc many: use a number"),
        (["--nosuch"], "unrecognized arguments: --nosuch"),
        (["--", "echo"], "not a torchrun or Python command: 'echo'"),
        (["--", "torchrun", "--nnodes", "3", "x.py"], "--nnodes=3 does not agree with the allocation's 2 hosts"),
        (["--", "python", "-m", "torchx_monarch.hosts"], "not a torchrun or Python command"),
    ):
        with pytest.raises(CommandError, match=why):
            of(*words)
        with pytest.raises(CommandError, match=f"role 'trainer': .*{why}"):
            find_rank_command(role("python", "-m", "torchx_monarch.hosts", *words, replicas=2))


def test_a_run_is_for_all_hosts_unless_it_says_otherwise() -> None:
    command = run_command(["torchrun", "--nproc-per-node", "2", "x.py"], {}, 3)
    assert (command.options.min_nodes, command.options.max_nodes) == (3, 3)
    assert run_command(["torchrun", "x.py"], {}, 3, nproc="4").options.nproc_per_node == "4"
    for words, nproc, why in (
        (
            ["torchrun", "--nnodes", "1", "x.py"],
            "",
            "^torchrun option --nnodes=1 does not agree with the allocation's 3",
        ),
        (["torchrun", "x.py"], "none", "--nproc-per-node=none is not a number of processes"),
        (["python", "x.py"], "2", "is for torchrun commands"),
        (["torchrun", "--help"], "", "not a torchrun or Python command"),
    ):
        with pytest.raises(CommandError, match=why):
            run_command(words, {}, 3, nproc)


def test_another_program_keeps_the_options() -> None:
    held = run_command(["torchrun", "--nproc-per-node", "2", "--tee", "3", "-m", "train"], {}, 1)
    command = with_program(held, ["eval.py", "--lr", "1"])
    assert command.program == Program("script", "eval.py", ("--lr", "1")) and command.options == held.options
    assert with_program(held, ["-m", "eval", "-x"]).program == Program("module", "eval", ("-x",))
    assert isinstance(with_program(None, ["eval.py"]), Command)
    with pytest.raises(CommandError, match="not a script with its arguments"):
        with_program(held, ["-m"])


def test_the_component() -> None:
    (role,) = hosts(j="3x8", idle_timeout=5, max_retries=2).roles
    assert role.env == {}
    assert (role.num_replicas, role.retry_policy, role.max_retries) == (3, RetryPolicy.REPLICA, 2)
    assert of(*role.args[2:], replicas=3) == AllocationSpec(5.0, "8", (), None)
    assert hosts(j="2x0").roles[0].args[-2:] == ["--nproc", "0"]
    for bad in ("1:2x4", "0x0", "x"):
        with pytest.raises(ComponentValidationException, match="-j |--nnodes 0"):
            hosts(j=bad)
