# SPDX-License-Identifier: BSD-3-Clause
"""Wrapping the commands of an app, and taking the wrapping off again."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.components import dist
from torchx.specs import AppDef, RetryPolicy, Role, macros

from torchx_monarch.command.allocations import hold_for_runs
from torchx_monarch.command.command import CommandError, parse
from torchx_monarch.command.rank_command import rank_command
from torchx_monarch.command.rewrite import WrapOptions, rewrite
from torchx_monarch.components import controller, ft, spmd
from torchx_monarch.model.host_spec import HostSpec

OPTIONS = WrapOptions()
HOST = [
    *("-m", "torchx_monarch.host", "--app", "${app_id}", "--role", "trainer", "--replica", "${replica_id}"),
    *("--replicas", "1", "--grace", "30", "--host-timeout", "300", "--preload", "auto", "--"),
]
TEXT = (
    'python -m torchx_monarch.host --app "${app_id}" --role trainer --replica "${replica_id}" --replicas 1 '
    "--grace 30 --host-timeout 300 --preload auto --"
)


def app(entrypoint: str, *args: str, replicas: int = 1, **env: str) -> AppDef:
    role = Role("trainer", "image", entrypoint=entrypoint, args=list(args), num_replicas=replicas, env=env)
    return AppDef("app", [role])


def rewritten(given: AppDef, options: WrapOptions = OPTIONS) -> Role:
    """The first role after rewriting, which changes nothing that is given."""
    before = copy.deepcopy(given)
    result = rewrite(given, options)
    assert given == before
    assert [spec.name for spec in result.roles] == [role.name for role in result.app.roles]
    assert [spec.runs_hosts for spec in result.roles] == [
        (role.entrypoint, role.args) != (old.entrypoint, old.args)
        for role, old in zip(result.app.roles, before.roles, strict=True)
    ]
    role = result.app.roles[0]
    assert role.env.pop("PYTHONUNBUFFERED") == "1"
    return role


@pytest.mark.parametrize(
    ("string", "ranks"),
    [
        ("torchrun train.py", 1),
        ("cd /w; torchrun --nproc-per-node 2 train.py --lr $LR", 2),
        ("cd /w; torchrun train.py", 1),
        ("python train.py", 1),
        ("torchrun --nproc-per-node $N train.py", None),
        ("torchrun $OPTIONS train.py", None),
        ("PET_NPROC_PER_NODE=2 torchrun train.py", None),
        ("export PET_NPROC_PER_NODE=2; torchrun train.py", None),
        ("source env.sh && torchrun train.py", None),
        ("torchrun --nproc-per-node auto train.py", None),
    ],
)
def test_the_number_of_ranks_is_not_guessed_where_the_shell_decides(string: str, ranks: int | None) -> None:
    command = rank_command(app("bash", "-c", string).roles[0])
    assert command is not None and command.ranks_per_host == ranks


@pytest.mark.parametrize(("marked", "option", "spares"), [(None, 0, 0), (None, 2, 2), (1, 0, 1), (1, 2, 1), (0, 2, 0)])
def test_spare_hosts_are_replicas_beside_the_world(marked: int | None, option: int, spares: int) -> None:
    given = app("torchrun", "--nnodes", "2:4", "train.py", replicas=3)
    given.roles[0].metadata = {} if marked is None else {"monarch": {"spares": marked}}
    result = rewrite(given, WrapOptions(spec=HostSpec(spares=option)))
    (spec,), (role,) = result.roles, result.app.roles
    assert (spec.replicas, spec.spares, role.num_replicas) == (3 + spares, spares, 3 + spares)
    assert spec.min_replicas == (2 if spares else None)
    words = shlex.join(role.args)
    assert f"--replicas {3 + spares} " in words and (f"--spares {spares} " in words) == bool(spares)


@pytest.mark.parametrize(("replicas", "spares"), [(10**9, 0), (1, 10**9), (1, 1 << 16)])
def test_a_role_with_too_many_replicas_is_refused(replicas: int, spares: int) -> None:
    message = f"role 'trainer' has {replicas + spares} replicas, spare hosts included; at most 65536 are possible"
    given = app("torchrun", "--nnodes", str(replicas), "train.py", replicas=replicas)
    with pytest.raises(CommandError, match=message):
        rewrite(given, WrapOptions(spec=HostSpec(spares=spares)))


def test_slow_hosts_are_replaced_by_spare_ones_or_left_out_of_elastic_jobs() -> None:
    fixed, elastic = (app("torchrun", "--nnodes", nodes, "train.py", replicas=3) for nodes in ("3", "2:3"))
    with pytest.raises(
        CommandError, match="role 'trainer' has no spare host that could replace a slow one: use spares=1"
    ):
        rewrite(fixed, WrapOptions(spec=HostSpec(slow_hosts="replace")))
    rewrite(fixed, WrapOptions(spec=HostSpec(slow_hosts="replace", spares=1)))
    rewrite(elastic, WrapOptions(spec=HostSpec(slow_hosts="replace")))

    beside = AppDef("app", [app("torchrun", "a.py").roles[0], app("echo", "hello").roles[0]])
    beside.roles[1].name = "other"
    assert [spec.spares for spec in rewrite(beside, WrapOptions(spec=HostSpec(spares=1))).roles] == [1, 0]
    beside.roles[1].metadata = {"monarch": {"spares": 1}}
    with pytest.raises(CommandError, match="runs no ranks"):
        rewrite(beside, OPTIONS)


def test_only_the_command_changes() -> None:
    given = app("torchrun", "a.py", A="1")
    given.metadata["x"] = "y"
    given.roles[0].max_retries = 3
    given.roles[0].port_map["x"] = 1
    result = rewrite(given, OPTIONS).app
    assert result != given
    result.roles[0].entrypoint, result.roles[0].args = "torchrun", ["a.py"]
    assert result.roles[0].env.pop("PYTHONUNBUFFERED") == "1"
    assert result == given
    result.roles[0].env["A"] = "2"
    assert given.roles[0].env == {"A": "1"}
    own = app("true", PYTHONUNBUFFERED="")
    assert rewrite(own, OPTIONS).app.roles[0].env == {"PYTHONUNBUFFERED": ""}


def test_an_entrypoint_with_dollars_stays_what_it_is_among_the_arguments() -> None:
    """TorchX replaces macros in arguments, not in entrypoints."""
    role = rewritten(app("/opt/$$a/${app_id}/torchrun", "a.py"))
    values = macros.Values(img_root="", app_id="X", replica_id="0", rank0_env="")
    assert values.apply(role).args[-2:] == ["/opt/$$a/${app_id}/torchrun", "a.py"]


def marked(text: str) -> str:
    """Replace host processes in a command by ``@``, ``@path`` where PATH decides what torchrun is, or ``@command``."""
    host = r"python -m torchx_monarch.host .*?(?:--(?:interpreter|workload) (path |command ))?-- "
    return re.sub(host, lambda found: f"@{found[1] or ' '}", text)


COMMANDS = """\
@ torchrun a.py
@ /opt/b/bin/torchrun a.py torchrun b.py
@ torch.distributed.run a.py
entrypoint.sh --verbose @path torchrun --nproc-per-node 2 a.py
w/entrypoint.sh @path python pr.py
w/entrypoint.sh @path python3 -um mod torchrun x
w/entrypoint.sh @path torch.distributed.run a.py
bash ./setup -v @path python -m torch.distributed.run a.py
env -i @ torchrun a.py
env -u X A=torchrun B=2 @ torchrun a.py
env PATH=/b/bin @path torchrun a.py
nohup nice -n 5 nice -5 @ torchrun a.py
timeout -k 5 -s INT 30 @ python a.py
stdbuf -oL setsid @ torchrun a.py
command @ torchrun a.py
exec -a x env @ torchrun a.py
numactl -N0 --membind 0 -l -- @ torchrun a.py
taskset -c 0-3 @ torchrun a.py
chrt -b 0 ionice -c3 @ torchrun a.py
nsys profile -t cuda,nvtx --stats=true -o x @ torchrun a.py
ncu --set full -fo x @ torchrun a.py
strace -fo x @ torchrun a.py
perf record -g -F 99 -- @ torchrun a.py
perf stat -e x @ torchrun a.py
srun -n 1 --gpus 2 -l --mpi=none @ torchrun a.py
conda run --no-capture-output -n x @path torchrun a.py
/opt/micromamba run -n x @path python a.py
uv run --with torchrun @path python t.py
poetry run @path torchrun a.py
pixi run @path torchrun a.py
@command which torchrun
@command grep -n torchrun x.log
@command echo --msg torchrun
@command axolotl train cfg.yml --launcher torchrun -- --nproc_per_node=2
@command command -v torchrun
@command perf report torchrun
@command conda install torchrun
@command uv run -m torch.distributed.run a.py
@command sudo torchrun a.py
@command launch torchrun a.py
@command env -u torchrun
@command timeout torchrun
@command env
@command bash
@command bash train.sh
@command sleep 1
@command python -V""".splitlines()


@pytest.mark.parametrize("text", COMMANDS)
def test_only_a_command_position_counts(text: str) -> None:
    command = re.sub(r"(?<=exec -a x )env |@(path|command)? ", "", text)
    role = rewritten(app(*shlex.split(command)))
    assert marked(shlex.join([role.entrypoint, *role.args])) == text
    role = rewritten(app("sh", "-c", command))
    if text.startswith("@command "):
        assert marked(shlex.join([role.entrypoint, *role.args])) == f"@command sh -c {shlex.quote(command)}"
    else:
        assert marked(role.args[1]) == text


@pytest.mark.parametrize(
    "text",
    [
        "cd x && A=1 exec @path torchrun --tee 3 $$X | tee log",
        "cd x&&@path torchrun a.py",
        "(cd x; @path 'torchrun' a.py)",
        "@ python a.py '$X' >log",
        "pip install . && @path python -m torch.distributed.run a.py",
        "python setup.py; @path torchrun a.py",
        "source x/activate && exec @path torchrun a.py",
        "PATH=x:$$PATH A=1 timeout 3 @path torchrun a.py",
        "PYTHONPATH=x @ python a.py",
        "@ torchrun --nnodes $N --nproc-per-node=$$N $$FLAGS a",
        "env $$VARIABLES @ torchrun a.py",
        "timeout $$T numactl $$OPTIONS @ $$VENV/bin/torchrun a.py",
        "time -p @path torchrun a.py",
        "command -v torchrun && @path torchrun a.py",
        "grep torchrun x; which torchrun",
        "$$RUNNER torchrun a.py",
        "cd x && python a.py",
        "bash -c 'torchrun a.py'",
        "torchrun 'a",
    ],
)
@pytest.mark.parametrize(
    "shell",
    [("bash", "-c"), ("/bin/sh", "-ec"), ("zsh", "-o", "errexit", "-c"), ("env", "A=1", "timeout", "9", "sh", "-c")],
)
def test_a_command_in_a_shell_string(shell: tuple[str, ...], text: str) -> None:
    role = rewritten(app(*shell, text.replace("@path ", "").replace("@ ", ""), "name", "arg"))
    words = [role.entrypoint, *role.args]
    if "@" not in text:
        del words[: words.index("--") + 1]
    assert marked(words.pop(len(shell))) == text
    assert words == [*shell, "name", "arg"]


def test_path_may_be_set_around_a_command() -> None:
    assert marked(rewritten(app("bash", "-lc", "torchrun a.py")).args[1]) == "@path torchrun a.py"
    assert "--interpreter" in rewritten(app("torchrun", "a.py", PATH="/b/bin")).args


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (app("torchrun", "a.py", replicas=2), "role 'trainer': torchrun option --nnodes=1 does not agree"),
        (app("sh", "-c", "cd x && torchrun a.py", replicas=2), "role 'trainer': torchrun option --nnodes=1 does not"),
        (
            app("torchrun", "a.py", PET_EVENT_LOG_HANDLER="x"),
            "role 'trainer': torchrun option --event-log-handler=x is",
        ),
        (app("setup.sh", "torchrun", "--logs-specs=x", "a.py"), "role 'trainer': torchrun option --logs-specs=x is"),
        (app("bash", "-c", "torchrun --logs-specs own $$X"), "role 'trainer': torchrun option --logs-specs=own is not"),
        (
            app("bash", "-c", "torchrun a; torchrun b"),
            "role 'trainer': its shell string holds 2 torchrun commands",
        ),
        (
            app("sh", "-c", "for i in 1; do torchrun a; done"),
            "role 'trainer': the torchrun in its shell string is in",
        ),
        (
            app("env", "-i", "torchrun", "--nnodes=2", "a.py", replicas=2),
            "role 'trainer': `env -i` removes the variables",
        ),
        (app("python", *HOST, "torchrun", "a.py"), "role 'trainer': The command already runs torchx_monarch.host."),
        (app("bash", "-c", f"cd x && {TEXT} torchrun a.py"), "role 'trainer': The command already runs"),
    ],
)
def test_refused(given: AppDef, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        rewrite(given, OPTIONS)
    assert str(caught.value).startswith(message)


def test_values_that_are_not_known_before_the_job_runs_are_left_to_the_host() -> None:
    rewritten(app("torchrun", "--node-rank", "${replica_id}", "--shutdown-timeout=${replica_id}", "a.py"))
    rewritten(app("torchrun", "a.py", PET_NODE_RANK="${replica_id}"))
    rewritten(app("env", "PET_NNODES=2", "torchrun", "a.py", replicas=2))
    for before in ("export PET_NNODES=2;", "PET_NNODES=2", "source env.sh &&", 'eval "$$X";'):
        rewritten(app("bash", "-c", f"{before} torchrun a.py", replicas=2))
    rewritten(
        app("bash", "-c", "torchrun --nnodes=$N --max-restarts ${R:-3} --nproc-per-node `nproc` a.py", replicas=2)
    )


@pytest.mark.parametrize("component", [dist.torchrun, spmd])
def test_elastic_components(component: Callable[..., AppDef]) -> None:
    given = component(script="a.py", j="1:3x2")
    role = rewritten(given)
    assert (role.min_replicas, role.num_replicas) == (1, 3)
    assert "--replicas 3" in " ".join(role.args)
    given.roles[0].num_replicas = 4
    with pytest.raises(CommandError, match="--nnodes=1:3 does not agree with the role's 4 replicas"):
        rewrite(given, OPTIONS)


arguments = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
    | st.sampled_from(["$X", "$$X", "${app_id}", "--", "a b", 'a"b', "it's", "a,b", "é\n", "torchrun", "-m", "", "\\"]),
    max_size=6,
)
starts = st.sampled_from(
    [
        ["torchrun", "--nproc-per-node", "2", "train.py"],
        ["torchrun", "--rdzv-id=${app_id}", "-m", "pkg"],
        ["python", "-um", "torch.distributed.run", "--no-python", "prog"],
        ["python", "-X", "dev", "train.py"],
        ["entrypoint.sh", "-v", "torchrun", "train.py"],
    ]
)


@given(starts, arguments)
def test_wrapping_and_then_parsing_gives_the_command_back(start: list[str], args: list[str]) -> None:
    given = app(*start, *args)
    role = rewritten(given)
    wrapped = [role.entrypoint, *role.args]
    program = wrapped.index("-m") - 1 if "entrypoint.sh" in start else 0
    command = wrapped[wrapped.index("--", program) + 1 :]
    by_path = ["--interpreter", "path"] if program else []
    assert wrapped[program : len(wrapped) - len(command)] == ["python", *HOST[:-1], *by_path, "--"]
    original = [*start, *args][program:]
    assert command == original
    assert parse(command) == parse(original) is not None


def test_the_host_gets_the_values_of_macros_that_a_shell_expands() -> None:
    """On Slurm ``${app_id}`` becomes ``$SLURM_JOB_ID``, which only the shell can replace."""
    role = rewritten(app("bash", "-c", "torchrun a.py"))
    values = macros.Values(img_root="", app_id='"$JOB"', replica_id="$NODE", rank0_env="")
    code = "import json, sys; print(json.dumps(sys.argv))"
    string = values.apply(role).args[1].replace("-m torchx_monarch.host", f"-c {shlex.quote(code)}", 1)
    env = {"PATH": str(Path(sys.executable).parent), "JOB": "7", "NODE": "1"}
    ran = subprocess.run(["/bin/bash", "-c", string], env=env, capture_output=True, text=True, check=True, timeout=240)
    assert json.loads(ran.stdout)[1:7] == ["--app", "7", "--role", "trainer", "--replica", "1"]


IMAGES = WrapOptions(in_images=True)
FIRST = WrapOptions(one_host_role=True)


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({}, OPTIONS, ""),
        ({"wrap": True}, OPTIONS, ""),
        ({"wrap": False}, OPTIONS, "its metadata has 'wrap': False"),
        ({"sidecar": True}, OPTIONS, "it is a sidecar that runs no ranks"),
        ({"sidecar": True, "wrap": True}, OPTIONS, ""),
        ({}, IMAGES, "its image may lack torchx-monarch; one that has it says so by metadata={'monarch': {'wrap': Tr"),
        ({"wrap": True}, IMAGES, ""),
        ({}, FIRST, "this scheduler has hosts in the first role alone"),
    ],
)
def test_which_commands_have_a_host_process(settings: dict[str, bool], options: WrapOptions, reason: str) -> None:
    given = AppDef("app", [*app("torchrun", "a.py").roles, *app("echo", "hello").roles])
    given.roles[1].name, given.roles[1].metadata = "other", {"monarch": settings}
    first, other = rewrite(given, options).roles
    assert first.runs_ranks and other.runs_hosts == (not reason)
    assert other.unwrapped.startswith(reason) and bool(other.unwrapped) == bool(reason)
    start = "each replica starts the command, without a host" if reason else "each replica starts a host process, which"
    assert other.describe_start().startswith(f"role other: {start}")


def test_ranks_start_by_themselves_where_the_role_says_so() -> None:
    given = app("torchrun", "a.py")
    given.roles[0].metadata = {"monarch": {"wrap": False}}
    assert rewritten(given).args == ["a.py"]


@pytest.mark.parametrize(
    ("policy", "more", "words"),
    [
        (RetryPolicy.APPLICATION, {}, "--starts together"),
        (RetryPolicy.ROLE, {}, "--starts together"),
        (RetryPolicy.REPLICA, {}, "--replacements 1"),
        (RetryPolicy.ROLE, {"max_retries": 0}, ""),
        (RetryPolicy.ROLE, {"num_replicas": 1}, ""),
        (RetryPolicy.REPLICA, {"num_replicas": 1}, ""),
        (RetryPolicy.ROLE, {"min_replicas": 1}, "--min-replicas 1 --replacements 1"),
        (RetryPolicy.ROLE, {"min_replicas": 2}, "--starts together"),
    ],
)
def test_hosts_of_commands_know_their_retry_policy(policy: RetryPolicy, more: dict[str, Any], words: str) -> None:
    given = app("echo", "hello", replicas=2)
    for name, value in {"retry_policy": policy, "max_retries": 1, **more}.items():
        setattr(given.roles[0], name, value)
    args = rewrite(given, OPTIONS).app.roles[0].args
    assert " ".join(args[args.index("--workload") + 2 :]) == f"{words} -- echo hello".strip()


@pytest.mark.parametrize(
    ("policy", "replicas", "retries", "others", "works"),
    [
        (RetryPolicy.APPLICATION, 2, 0, 1, ""),
        (RetryPolicy.APPLICATION, 1, 1, 0, ""),
        (RetryPolicy.REPLICA, 2, 1, 1, ""),
        (RetryPolicy.ROLE, 1, 1, 1, ""),
        (RetryPolicy.APPLICATION, 2, 1, 0, "REPLICA"),
        (RetryPolicy.ROLE, 2, 1, 0, "REPLICA"),
        (RetryPolicy.APPLICATION, 1, 1, 1, "ROLE"),
    ],
)
def test_policies_that_replicas_without_hosts_cannot_keep_are_refused(
    policy: RetryPolicy, replicas: int, retries: int, others: int, works: str
) -> None:
    given = app("echo", "hello", replicas=replicas)
    given.roles[0].retry_policy, given.roles[0].max_retries = policy, retries
    given.roles += [Role("other", "image", entrypoint="torchrun", args=["a.py"], max_retries=1) for _ in range(others)]
    if not works:
        assert [spec.runs_hosts for spec in rewrite(given, IMAGES).roles] == [False, True][: 1 + others]
        return
    message = rf"role 'trainer' cannot restart by RetryPolicy.{policy.name}: each .* Use RetryPolicy.{works}$"
    with pytest.raises(CommandError, match=message):
        rewrite(given, IMAGES)
    given.roles[0].metadata = {"monarch": {"sidecar": True}}
    rewrite(given, IMAGES)


def test_only_backends_that_replace_replicas_promise_replacements() -> None:
    def words(policy: RetryPolicy, replicas: int, retries: int = 3) -> list[str]:
        given = app("torchrun", f"--nnodes={replicas}", "a.py", replicas=replicas)
        given.roles[0].retry_policy, given.roles[0].max_retries = policy, retries
        return list(rewrite(given, WrapOptions()).app.roles[0].args)

    args = words(RetryPolicy.REPLICA, 2)
    assert args[args.index("--replacements") + 1] == "3"
    assert "--replacements" not in words(RetryPolicy.REPLICA, 1)
    assert "--replacements" not in words(RetryPolicy.REPLICA, 2, retries=0)
    assert "--replacements" not in words(RetryPolicy.APPLICATION, 2)


@pytest.mark.parametrize(
    ("change", "peers"),
    [
        ({}, 1),
        ({"args": ["a.py"], "entrypoint": "bash"}, 1),
        ({"max_retries": 0}, 0),  # of one of them
        ({"retry_policy": RetryPolicy.ROLE}, 0),
        ({"args": ["-m", "torchx_monarch.hosts"], "entrypoint": "python"}, 0),
        ({"metadata": {"monarch": {"wrap": False}}, "retry_policy": RetryPolicy.REPLICA}, 0),
    ],
)
@pytest.mark.parametrize("address", ["unix:@MONARCH_RUN_DIR/0.sock", "tls:@MAIN:1"])
def test_roles_that_restart_together_connect_to_the_first_one(change: dict[str, Any], peers: int, address: str) -> None:
    roles = [Role(name, "image", entrypoint="torchrun", args=["a.py"], max_retries=2) for name in ("a", "b")]
    roles.append(Role("c", "image", entrypoint="sh", args=["-c", "sleep 1"]))
    for name, value in change.items():
        setattr(roles[0], name, value)
    rendezvous = {"a": "tls:@MAIN:1", "b": "tls:@OTHER:2"} if address.startswith("tls") else {}
    made = rewrite(AppDef("app", roles), WrapOptions(rendezvous=rendezvous))
    words = [" ".join(role.args) for role in made.app.roles]
    assert [" --peer-roles 1 " in given for given in words] == [peers > 0, False, False]
    assert [f" --application {address} " in given for given in words] == [False, peers > 0, False]
    assert [spec.ends_together for spec in made.roles] == [peers > 0, peers > 0, False]


def test_sidecars_with_hosts_end_with_the_only_other_role() -> None:
    marked = {"monarch": {"sidecar": True}}
    board = Role("board", "", entrypoint="python", args=["-m", "tensorboard.main"], metadata=marked)
    trainer, other = (Role(name, "", entrypoint="torchrun", args=["a.py"]) for name in ("trainer", "other"))
    meshes = controller("a.py", meshes={"a": "1", "b": "2"})
    again = controller("a.py", meshes={"a": "1", "b": "2"}, max_retries=1)
    for app, follows in (
        (AppDef("app", [trainer, board]), [False, True]),
        (AppDef("app", [trainer, other, board]), [False, False, False]),  # the end of the first is not that of the app
        (meshes, [False, True]),
        (again, [False, False]),
    ):
        made = rewrite(app, WrapOptions()).app.roles
        assert ["--sidecar on --" in " ".join(role.args) for role in made] == follows
        assert not any("--peer-roles" in role.args for role in made[:1] if True in follows)


def test_groups_find_the_lighthouse_on_another_machine() -> None:
    given = ft("train.py", j="2x1")
    port = given.roles[-1].metadata["monarch"]["lighthouse_port"]
    local = rewrite(given, WrapOptions())
    assert local.app.roles[-1].args == given.roles[-1].args and "--lighthouse" not in local.app.roles[0].args
    rendezvous = {role.name: f"tls:@MONARCH_REPLICA0_{index}:{26000 + index}" for index, role in enumerate(given.roles)}
    result = rewrite(given, WrapOptions(rendezvous=rendezvous))
    words = result.app.roles[0].args
    assert words[words.index("--lighthouse") + 1] == f"@MONARCH_REPLICA0_2:{port}"
    assert result.app.roles[-1].args[:2] == ["--bind", f"0.0.0.0:{port}"]
    assert [spec.min_groups for spec in result.roles] == [1, 1, 0] and result.roles[-1].lighthouse_port == port


SIDECAR = {"monarch": {"sidecar": True}}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (ft("train.py", j="2x1").roles, "role 'group1' needs hosts, and this scheduler has them in the first role"),
        (
            [
                Role("a", "", entrypoint="torchrun", args=["a.py"]),
                Role("b", "", entrypoint="echo", metadata={"monarch": {"wrap": True}}),
            ],
            "role 'b' needs hosts, and this scheduler has them in the first role",
        ),
        (ft("train.py", j="1x1").roles, "on this scheduler no role learns the address of the role 'lighthouse'"),
        (controller("a.py", meshes={"a": "1", "b": "2"}).roles, "role 'b' needs hosts, .* in all roles$"),
        (
            [Role("a", "", entrypoint="true"), Role("b", "", entrypoint="torchrun", args=["b.py"])],
            "Other monarch_. schedulers, such as monarch_slurm .* submit 'b' as an app of its own",
        ),
        (
            [
                Role("a", "", entrypoint="torchrun", args=["a.py"]),
                Role("b", "", entrypoint="torchrun", args=["--nnodes=2", "b.py"], num_replicas=2, metadata=SIDECAR),
            ],
            "role 'b' needs hosts, .* in all roles$",
        ),
    ],
)
def test_hosts_of_several_roles_are_refused_where_one_alone_can_have_them(roles: list[Role], message: str) -> None:
    rendezvous = {roles[0].name: "tls:@MAIN:1"}
    with pytest.raises(CommandError, match=message):
        rewrite(AppDef("app", roles), WrapOptions(rendezvous=rendezvous, one_host_role=True))


def test_sidecars_run_without_hosts_where_one_role_alone_can_have_them() -> None:
    roles = [
        Role("a", "", entrypoint="torchrun", args=["a.py"]),
        Role("b", "", entrypoint="python", args=["-m", "tensorboard.main"], metadata=SIDECAR),
        Role("c", "", entrypoint="sleep", args=["100"]),
    ]
    made = rewrite(AppDef("app", roles), WrapOptions(rendezvous={"a": "tls:@MAIN:1"}, one_host_role=True))
    assert [spec.runs_hosts for spec in made.roles] == [True, False, False]
    assert made.app.roles[1].args == ["-m", "tensorboard.main"]


def test_overrides_of_a_role_become_its_fields() -> None:
    async def arguments() -> list[str]:
        return ["--nproc-per-node", "2", "a.py"]

    given = app("true")
    given.roles[0].overrides = {"entrypoint": lambda: "torchrun", "args": arguments()}
    for role in (rewrite(given, OPTIONS).app.roles[0], hold_for_runs(given).roles[0]):
        assert role.entrypoint == "python" and role.args[-4:] == ["torchrun", "--nproc-per-node", "2", "a.py"]
        assert role.overrides == {}
    assert (given.roles[0].entrypoint, given.roles[0].args[0]) == ("torchrun", "--nproc-per-node")


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("accelerate launch --num_processes 16 --mixed_precision bf16 train.py --lr 1", "-j 2x8 train.py --lr 1"),
        ("env A=1 accelerate launch --config_file a.yaml -m pkg.train --n 3", "-j 2xRANKS -m pkg.train --n 3"),
        ("deepspeed --num_gpus=8 train.py --deepspeed_config ds.json", "-j 2x8 train.py --deepspeed_config ds.json"),
        ("composer -n 4 train.py -m 3", "-j 2x4 train.py -m 3"),
        ("fabric run --devices 4 train.py", "-j 2x4 train.py"),
        ("lightning run model --devices 4 train.py", "-j 2x4 train.py"),
    ],
)
def test_other_launchers_are_refused_on_several_hosts(words: str, same: str) -> None:
    for command in (words.split(), ["sh", "-c", f"cd /data && {words}"]):
        with pytest.raises(CommandError, match=re.escape(f"`monarch.spmd {same}`")):
            rewrite(app(*command, replicas=2), OPTIONS)
        assert rewrite(app(*command), OPTIONS).roles[0].runs_hosts


@pytest.mark.parametrize("words", ["accelerate config", "deepspeed --node_rank 1 train.py", "grep composer train.py"])
def test_commands_that_only_look_like_launchers_run(words: str) -> None:
    rewrite(app(*words.split(), replicas=2), OPTIONS)
