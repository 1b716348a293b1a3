# SPDX-License-Identifier: BSD-3-Clause
"""What ``torchx_monarch`` exports is complete, typed and documented; the options of a run; old names."""

from __future__ import annotations

import ast
import dataclasses
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torchx.specs.finder import ComponentValidationException

import torchx_monarch
from torchx_monarch import RankResult, RunOptions, RunResult, SPMDError, TorchXMonarchError, exceptions

_PACKAGE = Path(torchx_monarch.__file__).parent

_MODULES: dict[str, str] = torchx_monarch._PUBLIC


def public_methods(name: str) -> list[ast.FunctionDef]:
    """Return the public methods of an exported class."""
    tree = ast.parse((_PACKAGE / f"{_MODULES[name].replace('.', '/')}.py").read_text())
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return [node for body in bodies for node in body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]


def test_each_public_name_is_listed_everywhere() -> None:
    tree = ast.parse((_PACKAGE / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    imported = {alias.name: node.module for node in imports for alias in node.names}
    assert imported == {name: f"torchx_monarch.{module}" for name, module in _MODULES.items()}
    assert list(_MODULES) == torchx_monarch.__all__ == sorted(torchx_monarch.__all__)
    assert [name for name in dir(torchx_monarch) if not name.startswith("__")] == torchx_monarch.__all__
    code = "import torchx_monarch as t; [getattr(t, name) for name in t.__all__]"  # in a process of its own: Monarch's
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        torchx_monarch.nosuch  # noqa: B018


def test_the_tree_of_exceptions_is_the_documented_one() -> None:
    lines = re.findall(r"^ {4}([│ ]*(?:[├└]── )?)(\w+Error)(.*)$", exceptions.__doc__ or "", re.MULTILINE)
    parents: list[type] = []
    for indent, name, more in lines:
        kind = getattr(torchx_monarch, name)
        depth = len(indent) // 4
        parents[depth:] = [kind]
        if depth:
            assert parents[depth - 1] in kind.__bases__
        assert ("RuntimeError" in more) <= issubclass(kind, RuntimeError)
        assert ("ValueError" in more) <= issubclass(kind, ValueError)
        assert ("ComponentValidationException" in more) <= issubclass(kind, ComponentValidationException)
    assert {name for _, name, _ in lines} == {name for name in torchx_monarch.__all__ if name.endswith("Error")}
    assert lines[0][1] == TorchXMonarchError.__name__


def test_the_api_page_has_every_public_name() -> None:
    page = (_PACKAGE.parent / "docs" / "reference" / "api.md").read_text()
    assert [name for name in torchx_monarch.__all__ if f"`{name}" not in page] == []
    for name in torchx_monarch.__all__:
        for method in public_methods(name):
            deprecated = "Deprecated" in (ast.get_docstring(method) or "")
            assert deprecated or f"`{method.name}" in page, f"{name}.{method.name} is not in the page"


# -- options of a run --------------------------------------------------------------------------------------------------


class RequestMadeError(Exception):
    """Ends a call before it needs hosts."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which hosts are asked for a run."""
    found: dict[str, Any] = {}

    def run_request(script_args: object, options: RunOptions) -> NoReturn:
        found.update(script_args=script_args, **dataclasses.asdict(options))
        raise RequestMadeError

    monkeypatch.setattr("torchx_monarch.client.job.run_request", run_request)
    return found


@pytest.mark.parametrize("method", ["run_spmd", "run_spmd_async"])
def test_arguments_replace_single_options(method: str, asked: dict[str, Any], tmp_path: Path) -> None:
    job = torchx_monarch.SPMDJob("monarch_local://torchx/app", workspace=str(tmp_path), sync="never")
    options = RunOptions(env={"A": "1"}, nproc=2, output="none")
    with pytest.raises(RequestMadeError):
        getattr(job, method)(["train.py"], options=options, nproc=4, timeout=60)
    expected = RunOptions(env={"A": "1"}, nproc=4, timeout=60, output="none", workspace=str(tmp_path), sync="never")
    assert asked == {"script_args": ["train.py"], **dataclasses.asdict(expected)}
    assert options.nproc == 2
    with pytest.raises(RequestMadeError):
        getattr(job, method)(cwd="/there")
    assert (asked["cwd"], asked["workspace"]) == ("/there", None)
    with pytest.raises(TypeError, match=r"a run has no option nprocs\. Did you mean nproc\?"):
        getattr(job, method)(["train.py"], nprocs=4)


@pytest.mark.parametrize(
    ("options", "kind", "why"),
    [
        ({"cwd": "/a", "workspace": "/b"}, ValueError, "give cwd='/a', a folder that the hosts have, or workspace="),
        ({"workspace": "/missing"}, ValueError, "workspace='/missing': there is no such folder"),
        ({"output": "file"}, ValueError, "output='file': use 'stream', 'store', 'none' or a function"),
        ({"sync": "often"}, ValueError, "sync='often' is none of auto, always, never"),
        ({"env": {"A": None}}, ValueError, "env={'A': None}: give a text, such as '' for an empty value"),
        ({"timeout": "5"}, ValueError, "timeout='5': give a number of seconds above 0, or None for no limit"),
        ({"timeout": float("inf")}, ValueError, "timeout=inf: give a number of seconds above 0, or None for no limit"),
        ({"timeout": True}, ValueError, "timeout=True: give a number of seconds above 0, or None for no limit"),
        ({"nproc": 0}, ValueError, "nproc=0: give a number from 1 to 65536, or one of auto, gpu, cpu, xpu"),
        ({"nproc": 65537}, ValueError, "nproc=65537: give a number from 1 to 65536"),
        ({"nprocs": 2}, TypeError, "nprocs"),
    ],
)
def test_invalid_options_are_reported_before_hosts_are_asked(
    options: dict[str, Any], kind: type[Exception], why: str
) -> None:
    job = torchx_monarch.SPMDJob("monarch_local://torchx/app")
    for call in (RunOptions, job.run_spmd, job.run_spmd_async):
        with pytest.raises(kind, match=re.escape(why)):
            call(**options)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("monarch_slurm",), {}),
        (("monarch_slurm", "/code", [{"entrypoint": "torchrun", "args": ["train.py"]}]), {}),
        ((), {"scheduler": "monarch_slurm", "workspace": "/code"}),
        (("monarch_slurm",), {"original_roles": []}),
    ],
)
def test_the_arguments_of_monarchs_own_class_are_refused_at_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    handle = "monarch_slurm://torchx/7"
    with pytest.raises(TypeError, match=f"takes neither scheduler nor .* Write SPMDJob.attach\\('{handle}'\\)"):
        torchx_monarch.SPMDJob(handle, *args, **kwargs)


def test_a_variable_of_a_monarch_job_has_a_value() -> None:
    with pytest.raises(ValueError, match="env={'A': None}: give a text"):
        torchx_monarch.MonarchJob({"trainers": 1}, env={"A": None})  # type: ignore[dict-item]


# -- exceptions as users see them --------------------------------------------------------------------------------------


def test_an_error_of_a_run_survives_pickling() -> None:
    rank = RankResult(1, 1, 0, "n1", 7, 3, 1.0, True, "ValueError: boom", "Traceback\nValueError: boom", "/logs/err")
    error = SPMDError(RunResult(4, 3, "rank 1 exited with code 3", {1: rank}, cause=1))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.result == error.result
    assert (copy.root_cause, copy.failed_ranks, copy.log_paths) == (rank, [1], {1: "/logs/err"})
