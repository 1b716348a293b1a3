# SPDX-License-Identifier: BSD-3-Clause
"""With which interpreter the zygote of a run starts, and which runs can share it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from torchx_monarch.command.command import Command, parse
from torchx_monarch.controller.host_messages import LaunchRanks, decode_request, encode_request
from torchx_monarch.host.ranks.leading_statements import Statement
from torchx_monarch.host.ranks.run_spec import RunSpec, rank_environment
from torchx_monarch.model.env_names import keep_monarch_log_private
from torchx_monarch.model.world import HostPlace, HostRange, World
from torchx_monarch.transport import messages

BARE = [sys.executable, "-I", "-S"]
OURS = [sys.executable, "-u"]

DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
WORLD = World(0, 0, 0, (HostRange(0, 1, 2),), "h", 1, True, "r")


def command(*words: str) -> Command:
    parsed = parse(words, {})
    assert parsed is not None
    return parsed


def spec(*words: str, modules: tuple[str, ...] = ("torch",), cwd: str | None = None, **added: str) -> RunSpec:
    return RunSpec(command(*words), {"PATH": "/usr/bin:/bin", "MONARCH_RUN_DIR": "/r"}, modules, added, cwd)


@pytest.mark.parametrize(
    ("run", "python", "preloads"),
    [
        (spec("torchrun", "x.py"), OURS, ["torch"]),
        (spec("torchrun", "x.py", modules=()), BARE, []),
        (spec("python", "x.py"), BARE, []),
        (spec("torchrun", "--no-python", "ls"), BARE, []),
        (spec("torchrun", "--nproc-per-node", "gpu", "--no-python", "ls"), OURS, []),
        (spec("torchrun", "--numa-binding", "node", "x.py", modules=()), OURS, []),
    ],
)
def test_the_interpreter_of_the_zygote(run: RunSpec, python: list[str], preloads: list[str]) -> None:
    assert (run.zygote_command(), run.preload) == (python, preloads)


@pytest.mark.parametrize(("target", "leads"), [("prog0.py", True), ("prog${local_rank}.py", False)])
def test_programs_of_their_own_share_no_leading_statements(target: str, leads: bool, tmp_path: Path) -> None:
    (tmp_path / "prog0.py").write_text("import sklearn")
    parsed = parse(["torchrun", target], {})
    assert parsed is not None
    assert bool(RunSpec(parsed, {}, ["torch"], cwd=str(tmp_path)).with_leading().leading) == leads


def test_the_zygote_starts_with_the_variables_that_are_read_early() -> None:
    run = spec("torchrun", "x.py", cwd="/w", PYTHONHASHSEED="0", MINE="1")
    run = dataclasses.replace(run, role_environ={**run.role_environ, "TORCHELASTIC_ERROR_FILE": "error.json"})
    assert run.environ["MINE"] == "1"
    log: dict[str, str] = {}
    keep_monarch_log_private(log)
    assert run.start_environ(2) == {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **log}
    assert "OMP_NUM_THREADS" not in run.start_environ(1)


@pytest.mark.parametrize(
    ("base", "devices"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "4, 5"}, {"CUDA_VISIBLE_DEVICES": "5"}),
        # For ROCm the one that counts if both are set.
        ({"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "2,3"}, dict.fromkeys(DEVICES, "3")),
    ],
)
def test_the_device_of_a_rank_with_a_virtual_local_rank(base: dict[str, str], devices: dict[str, str]) -> None:
    options = command("torchrun", "--virtual-local-rank", "x.py").options
    env = rank_environment(WORLD, options, 0, 1, base, "")
    assert {name: env[name] for name in DEVICES if name in env} == devices and env["LOCAL_RANK"] == "0"


@pytest.mark.parametrize("name", DEVICES)
def test_ranks_without_a_device_of_their_own_are_refused(name: str) -> None:
    options = command("torchrun", "--virtual-local-rank", "x.py").options
    with pytest.raises(ValueError, match=f"local rank 1 has no device of its own in {name}=7"):
        rank_environment(WORLD, options, 0, 1, {name: "7"}, "")


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (spec("torchrun", "y.py", "--lr", "1", cwd="/v", MINE="2", TORCHX_JOB_ID="a/b"), True),
        (spec("torchrun", "x.py", cwd="/w", PYTHONPATH="/lib"), False),
        (spec("torchrun", "x.py", cwd="/w", KINETO_USE_DAEMON="1"), False),
        (spec("torchrun", "x.py", cwd="/w", modules=("torch", "numpy")), False),
        (spec("torchrun", "--no-python", "ls", cwd="/w"), False),
    ],
)
def test_runs_share_a_zygote_that_reads_the_same_early(other: RunSpec, shared: bool) -> None:
    assert (spec("torchrun", "x.py", cwd="/w").signature(2) == other.signature(2)) is shared


@pytest.mark.parametrize(("name", "shared"), [("TORCHX_JOB_ID", True), ("MINE", False)])
def test_runs_share_leading_statements_if_these_have_the_same_variables(name: str, shared: bool) -> None:
    statements = (Statement("x.py", 1, "import os"),)
    first = dataclasses.replace(spec("torchrun", "x.py", cwd="/w"), leading=statements, added={name: "1"})
    assert (first.signature(2) == dataclasses.replace(first, added={name: "2"}).signature(2)) is shared


@pytest.mark.parametrize(("modules", "shared"), [(("torch",), True), (("torch", "transformers"), False), ((), True)])
def test_a_module_other_than_torch_may_read_any_variable(modules: tuple[str, ...], shared: bool) -> None:
    runs = [spec("torchrun", "x.py", cwd="/w", modules=modules, HF_HOME=home) for home in ("/a", "/b")]
    assert (runs[0].signature(2) == runs[1].signature(2)) is shared


def test_the_zygote_starts_in_the_folder_of_the_run_only_where_a_path_is_relative_to_it() -> None:
    assert spec("torchrun", "x.py").start_folder() is None
    assert spec("torchrun", "x.py", cwd="/w").start_folder() is None
    assert spec("torchrun", "x.py", cwd="/w", PYTHONPATH="/a:lib").start_folder() == "/w"


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("sh", ""),
        ("nosuch-python", "'nosuch-python': No such file or directory"),
        ("venv/bin/python", ""),  # relative to the folder of the program
    ],
)
def test_an_interpreter_is_looked_for_on_the_path_of_the_role(python: str, reason: str) -> None:
    parsed = parse(["torchrun", "x.py"], {"PYTHON_EXEC": python})
    assert parsed is not None
    assert RunSpec(parsed, {"PATH": "/usr/bin:/bin"}, ()).why_no_python() == reason


def test_hosts_get_a_short_description_of_a_world_of_thousands_of_them() -> None:
    """Replica 0 sends it to each of them, so that its length must not grow with their number."""
    replicas = [*range(5000), 16384, *range(5001, 16384)]  # a spare host has the place of another one
    ranks = [8] * 16000 + [4] * 384
    world = World(0, 0, 0, HostRange.listed(zip(replicas, ranks, strict=True)), "h", 1, True, "r")
    data = encode_request(1, LaunchRanks(world))
    assert len(data) < 1000 and decode_request(messages.decode(data)) == LaunchRanks(world)
    assert (world.size, world.host_count) == (8 * 16000 + 4 * 384, 16384)
    first = 0
    for group_rank, (replica, nproc) in enumerate(zip(replicas, ranks, strict=True)):
        assert world.place(replica) == HostPlace(group_rank, first, nproc)
        assert world.replica_of(first) == world.replica_of(first + nproc - 1) == replica
        first += nproc
    assert rank_environment(world, command("torchrun", "x.py").options, 16384, 3, {}, "")["RANK"] == "40003"
