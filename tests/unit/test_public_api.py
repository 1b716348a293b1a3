# SPDX-License-Identifier: BSD-3-Clause
"""What ``torchx_monarch`` exports is complete, typed and documented; the options of a run; old names."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.specs.finder import ComponentValidationException

import torchx_monarch
from torchx_monarch import (
    RankResult,
    RunOptions,
    RunResult,
    SPMDError,
    SPMDJob,
    TorchXMonarchError,
    exceptions,
)
from torchx_monarch.client import allocation as allocation_module

_PACKAGE = Path(torchx_monarch.__file__).parent

_MODULES: dict[str, str] = torchx_monarch._PUBLIC

_MADE_BY_US = {"RunHandle", "ThisJob", "SPMDError"}
"""Exported classes of which users do not create instances, so that the arguments of their constructors are internal."""


def definition(name: str) -> ast.AST:
    """The statement that defines an exported name."""
    for node in tree_of(_MODULES[name]).body:
        named = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
        if named or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name):
            return node
    raise AssertionError(f"{name} is not defined in {_MODULES[name]}")


def tree_of(module: str) -> ast.Module:
    return ast.parse((_PACKAGE / f"{module.replace('.', '/')}.py").read_text())


def origins(module: str) -> dict[str, str]:
    """The full name of each name that a module imports or defines at its top."""
    found = {}
    tree = tree_of(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = f"torchx_monarch.{module}.{node.name}"
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = f"torchx_monarch.{module}.{ast.unparse(node.targets[0])}"
    return found


def public_functions(name: str) -> Iterator[ast.FunctionDef]:
    """The exported function, or the public methods of the exported class."""
    node = definition(name)
    for each in node.body if isinstance(node, ast.ClassDef) else [node]:
        constructor = isinstance(each, ast.FunctionDef) and each.name == "__init__" and name not in _MADE_BY_US
        if isinstance(each, ast.FunctionDef) and (constructor or not each.name.startswith("_")):
            yield each


def annotations_of(name: str) -> Iterator[ast.expr]:
    for function in public_functions(name):
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None and each.arg not in ("self", "cls"):
                assert each.annotation is not None, f"{name}.{function.name}: {each.arg} has no type"
                yield each.annotation
        assert function.returns is not None, f"{name}.{function.name} has no type"
        yield function.returns
    node = definition(name)
    if isinstance(node, ast.ClassDef):
        yield from (each.annotation for each in node.body if isinstance(each, ast.AnnAssign))


def test_each_public_name_is_listed_everywhere() -> None:
    tree = ast.parse((_PACKAGE / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    imported = {alias.name: node.module for node in imports for alias in node.names}
    assert imported == {name: f"torchx_monarch.{module}" for name, module in _MODULES.items()}
    assert list(_MODULES) == torchx_monarch.__all__ == sorted(torchx_monarch.__all__)
    assert set(torchx_monarch.__all__) <= set(dir(torchx_monarch))
    code = "import torchx_monarch as t; [getattr(t, name) for name in t.__all__]"  # in a process of its own: Monarch's
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        torchx_monarch.nosuch  # noqa: B018


@pytest.mark.parametrize("name", torchx_monarch.__all__)
def test_public_signatures_use_public_types(name: str) -> None:
    exported = {f"torchx_monarch.{module}.{each}" for each, module in _MODULES.items()}
    known = origins(_MODULES[name])
    for annotation in annotations_of(name):
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                origin = known[node.id]
                root = origin.partition(".")[0]
                foreign = root in sys.stdlib_module_names or root in ("torchx", "monarch", "typing_extensions")
                assert foreign or origin in exported, f"{name} uses {origin}, which is not exported"


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
        for function in public_functions(name):
            if isinstance(definition(name), ast.ClassDef) and function.name != "__init__":
                deprecated = "Deprecated" in (ast.get_docstring(function) or "")
                assert deprecated or f"`{function.name}" in page, f"{name}.{function.name} is not in the page"


# -- options of a run --------------------------------------------------------------------------------------------------


class RequestMadeError(Exception):
    """Ends a call before it needs hosts."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which hosts are asked for a run."""
    found: dict[str, Any] = {}

    def run_message(hosts: object, script_args: object, options: RunOptions) -> dict[str, Any]:
        found.update(script_args=script_args, **dataclasses.asdict(options))
        raise RequestMadeError

    monkeypatch.setattr(allocation_module, "run_message", run_message)
    return found


@pytest.mark.parametrize("method", ["run_spmd", "run_spmd_async"])
def test_arguments_replace_single_options(method: str, asked: dict[str, Any], tmp_path: Path) -> None:
    job = SPMDJob("monarch_local://torchx/app", workspace=str(tmp_path), sync="never")
    options = RunOptions(env={"A": "1"}, nproc=2, output="none")
    with pytest.raises(RequestMadeError):
        getattr(job, method)(["train.py"], options=options, nproc=4, timeout=60)
    expected = RunOptions(env={"A": "1"}, nproc=4, timeout=60, output="none", workspace=str(tmp_path), sync="never")
    assert asked == {"script_args": ["train.py"], **dataclasses.asdict(expected)}
    assert options.nproc == 2
    with pytest.raises(RequestMadeError):
        getattr(job, method)(cwd="/there")
    assert (asked["cwd"], asked["workspace"]) == ("/there", None)


@pytest.mark.parametrize(
    ("options", "kind", "why"),
    [
        ({"cwd": "/a", "workspace": "/b"}, ValueError, "give cwd='/a', a folder that the hosts have, or workspace="),
        ({"output": "file"}, ValueError, "output='file': use 'stream', 'store', 'none' or a function"),
        ({"sync": "often"}, ValueError, "sync='often' is none of auto, always, never"),
        ({"nprocs": 2}, TypeError, "nprocs"),
    ],
)
def test_invalid_options_are_reported_before_hosts_are_asked(
    options: dict[str, Any], kind: type[Exception], why: str
) -> None:
    job = SPMDJob("monarch_local://torchx/app")
    for call in (RunOptions, job.run_spmd, job.run_spmd_async):
        with pytest.raises(kind, match=re.escape(why)):
            call(**options)


# -- old names, and exceptions as users see them -----------------------------------------------------------------------


def test_old_names_still_work_and_name_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SPMDJob("monarch_local://torchx/app")
    ended: list[object] = []
    monkeypatch.setattr(job, "cancel_run", lambda *given: ended.append(given))
    with pytest.warns(DeprecationWarning, match="SPMDJob.end_run is deprecated; use SPMDJob.cancel_run") as warned:
        job.end_run(3, kill=True)
    assert ended == [(3, True)] and warned[0].filename == __file__


def test_an_error_of_a_run_survives_pickling() -> None:
    rank = RankResult(1, 1, 0, "n1", 7, 3, 1.0, True, "ValueError: boom", "Traceback\nValueError: boom", "/logs/err")
    error = SPMDError(RunResult(4, 3, "rank 1 exited with code 3", {1: rank}, cause=1))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.result == error.result
    assert (copy.root_cause, copy.failed_ranks, copy.log_paths) == (rank, [1], {1: "/logs/err"})
