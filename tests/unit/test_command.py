# SPDX-License-Identifier: BSD-3-Clause
"""What a command means."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchx_monarch.command.command import Command, CommandError, Program, check, parse
from torchx_monarch.command.torchrun_options import DEFAULTS


def meaning(text: str, env: Mapping[str, str] | None = None) -> Command:
    command = parse(shlex.split(text), env or {})
    assert command is not None
    return command


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("torchrun train.py", Program("script", "train.py")),
        ("/opt/venv/bin/torchrun train.py --lr 0.1", Program("script", "train.py", ("--lr", "0.1"))),
        ("torchrun -m pkg.mod -m x", Program("module", "pkg.mod", ("-m", "x"))),
        ("torchrun --no-python ./run.sh a", Program("exec", "./run.sh", ("a",))),
        ("torchrun train.py --tee 3 -- x", Program("script", "train.py", ("--tee", "3", "--", "x"))),
        ("torchrun train.py --nproc 4 --r -h", Program("script", "train.py", ("--nproc", "4", "--r", "-h"))),
        ("torchrun --tee 3 -- train.py x", Program("script", "train.py", ("x",))),
        ("torchrun train.py '--x=a b\"c,$d' ''", Program("script", "train.py", ('--x=a b"c,$d', ""))),
    ],
)
def test_torchrun(text: str, program: Program) -> None:
    command = meaning(text)
    assert (command.kind, command.program, command.interpreter) == ("torchrun", program, ())
    assert command.torchrun == text.split()[0]
    assert meaning(text.replace(command.torchrun, "torch.distributed.run", 1)) == replace(command, torchrun="")


@pytest.mark.parametrize("module", ["torch.distributed.run", "torchrun"])
@pytest.mark.parametrize("flags", ["-m", "-u -m", "-um", "-X faulthandler -m", "-Wignore -m"])
def test_torchrun_as_a_module(flags: str, module: str) -> None:
    command = meaning(f"/opt/bin/python3.12 {flags} {module} --nproc-per-node 2 train.py -m x")
    assert command.kind == "torchrun"
    assert command.options == replace(DEFAULTS, nproc_per_node="2")
    assert command.program == Program("script", "train.py", ("-m", "x"))
    assert command.interpreter == ("/opt/bin/python3.12",)  # torchrun's sys.executable, without its flags


def test_torchruns_interpreter_comes_from_the_environment_first() -> None:
    env = {"PYTHON_EXEC": "/x/python"}
    assert meaning("torchrun a.py", env).interpreter == ("/x/python",)
    assert meaning("python -m torch.distributed.run a.py", env).interpreter == ("/x/python",)
    assert meaning("python a.py", env).interpreter == ("python",)


@pytest.mark.parametrize(
    ("text", "interpreter", "program"),
    [
        ("python train.py", "python", Program("script", "train.py")),
        ("/usr/bin/python3.11 train.py -c 1", "/usr/bin/python3.11", Program("script", "train.py", ("-c", "1"))),
        ("python3 -u train.py", "python3 -u", Program("script", "train.py")),
        ("python -X faulthandler -X dev t.py", "python -X faulthandler -X dev", Program("script", "t.py")),
        ("python -Xdev -W error -Werror t.py", "python -Xdev -W error -Werror", Program("script", "t.py")),
        ("python -OOBs t.py -m", "python -OOBs", Program("script", "t.py", ("-m",))),
        ("python -uW ignore t.py", "python -uW ignore", Program("script", "t.py")),
        ("python -I -m pkg.mod -c x", "python -I", Program("module", "pkg.mod", ("-c", "x"))),
        ("python -um pkg.mod x", "python -u", Program("module", "pkg.mod", ("x",))),
        ("python -mpkg.mod x", "python", Program("module", "pkg.mod", ("x",))),
        ("python -c 'print(1)' a", "python", Program("code", "print(1)", ("a",))),
        ("python -uc'print(1)' a", "python -u", Program("code", "print(1)", ("a",))),
        (
            "python --check-hash-based-pycs never t.py",
            "python --check-hash-based-pycs never",
            Program("script", "t.py"),
        ),
        ("python -- -t.py a", "python", Program("script", "-t.py", ("a",))),
    ],
)
def test_python(text: str, interpreter: str, program: Program) -> None:
    assert meaning(text) == Command("python", DEFAULTS, program, tuple(interpreter.split()))


@pytest.mark.parametrize(
    "text",
    [
        *("", "echo hello", "bash -c 'torchrun a.py'", "mytorchrun a.py", "torchrun --help", "python", "python -"),
        *("python - a", "python --", "python -i train.py", "python -V", "python -uV", "python --version", "python -h"),
        *("python --help-all", "python -m", "python -c", "python -Z train.py", "python -X", "python2 train.py"),
        *("python -m torch.distributed.run --help", "pypy train.py", "pythonw train.py", "python3.11-config --libs"),
    ],
)
def test_no_rank_program(text: str) -> None:
    assert parse(shlex.split(text)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "python -m torch.distributed.launch a.py",
            "torch.distributed.launch is deprecated and not supported. Use torch",
        ),
        ("python -m torchx_monarch.host -- torchrun a.py", "The command already runs torchx_monarch.host."),
    ],
)
def test_refused_by_the_parser(text: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse(shlex.split(text))
    assert str(caught.value).startswith(message)


ECHO = "import json, sys; print(json.dumps([sys.argv, bool(sys.flags.dont_write_bytecode), bool(sys.flags.optimize)]))"
FLAGS = ["-B", "-O", "-Wignore", "-W", "ignore", "-X", "dev", "-Xutf8", "-BO", "-OW", "-", "--", "-c", "-BX", "-m", "x"]


@settings(max_examples=settings().max_examples // 2)  # each starts two interpreters
@given(st.lists(st.sampled_from(FLAGS), max_size=3), st.sampled_from(["-c", "-Bc", "-c" + ECHO]))
def test_python_flags_are_read_as_cpython_reads_them(flags: list[str], last: str) -> None:
    """Where we find our code to be the program of a command, CPython runs it, with those arguments and flags."""
    words = [*flags, last, ECHO, "a b"]
    command = parse(["python", *words])
    assume(command is not None and command.program.mode == "code" and command.program.target == ECHO)
    assert command is not None
    program = ["-c", command.program.target, *command.program.args]
    ran, ran_as_read = (
        subprocess.run([sys.executable, "-S", *argv], env={}, capture_output=True, text=True, check=True, timeout=240)
        for argv in (words, [*command.interpreter[1:], *program])
    )
    assert ran.stdout == ran_as_read.stdout
    assert json.loads(ran.stdout)[0] == ["-c", *command.program.args]


def refusal(text: str, replicas: int = 1) -> str:
    with pytest.raises(CommandError) as caught:
        check(meaning(text), replicas=replicas, role="trainer")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "replicas"),
    [
        ("torchrun a.py", 1),
        ("torchrun --standalone a.py", 1),
        ("torchrun --nnodes 2 --nproc-per-node auto a.py", 2),
        ("torchrun --nnodes 3:3 --nproc-per-node xpu a.py", 3),
        ("torchrun --max-restarts 0 --event-log-handler null a.py", 1),
        ("torchrun --nnodes 1:4 --rdzv-conf join_timeout=9 a.py", 2),
        ("torchrun --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-conf x=y --node-rank 7 --master-addr m a.py", 1),
        ("torchrun --start-method fork --monitor-interval 60 --local-addr h --master-port 1 a.py", 1),
        ("torchrun --no-python -- sh -c x", 1),
        ("python train.py", 7),
    ],
)
def test_what_can_be_run(text: str, replicas: int) -> None:
    check(meaning(text), replicas=replicas, role="trainer")


@pytest.mark.parametrize(
    ("text", "replicas", "parts"),
    [
        ("torchrun a.py", 2, ["--nnodes=1", "role's 2 replicas", "Use --nnodes=2"]),
        ("torchrun --nnodes 4 a.py", 2, ["--nnodes=4", "2 replicas", "Use --nnodes=2"]),
        ("torchrun --nnodes 3:4 a.py", 2, ["--nnodes=3:4", "does not agree"]),
        ("torchrun --nnodes 1:2 a.py", 3, ["--nnodes=1:2", "role's 3 replicas", "Use --nnodes=3"]),
        ("torchrun --standalone a.py", 2, ["--standalone is for one node", "2 replicas", "use --nnodes=2"]),
        ("torchrun --nproc-per-node 0 a.py", 1, ["--nproc-per-node=0", "auto, gpu, cpu, xpu"]),
        ("torchrun --nproc-per-node tpu a.py", 1, ["--nproc-per-node=tpu", "auto, gpu, cpu, xpu"]),
        ("torchrun --no-python -m a", 1, ["--no-python and --module contradict"]),
        ("torchrun --event-log-handler x a.py", 1, ["--event-log-handler=x is not supported: ", "events.jsonl"]),
        ("torchrun --logs-specs x a.py", 1, ["--logs-specs=x is not supported: ", "--log-dir"]),
        ("torchrun --log-dir /dev/null --duplicate-stdout-filters a a.py", 1, ["--log-dir=/dev/null and", "filters"]),
    ],
)
def test_what_cannot(text: str, replicas: int, parts: Sequence[str]) -> None:
    message = refusal(text, replicas)
    assert message.startswith("role 'trainer': ") and message.endswith(".")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "replicas", "fewest"),
    [("torchrun a.py", 1, 1), ("torchrun --nnodes 2:4 a.py", 3, 2), ("python a.py", 7, 7)],
)
def test_the_fewest_replicas(text: str, replicas: int, fewest: int) -> None:
    assert meaning(text).min_nodes(replicas) == fewest


def test_the_macro_is_replaced_where_torchrun_replaces_it() -> None:
    words = "'t${local_rank}.py' 'x${local_rank}$$' '$HOME'"
    assert meaning(f"torchrun {words}").program_of(3) == Program("script", "t3.py", ("x3$", "$HOME"))
    python = Program("script", "t${local_rank}.py", ("x${local_rank}$$", "$HOME"))
    assert meaning(f"python {words}").program_of(3) == python
    assert meaning("torchrun --no-python 'x${local_rank}' '${local_rank}'").program_of(1).target == "x${local_rank}"
