# SPDX-License-Identifier: BSD-3-Clause
"""Find the leading statements of a program: those that the zygote can execute before its ranks are forked.

They are the statements before the first one that does anything but import modules that are not the user's own, assign
constants to names, or set environment variables to constants. Whatever the program does later cannot change what these
imports do, so a fork that finds them executed is in the state of an interpreter that has executed them itself.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torchx_monarch.host.ranks.preloaded_modules import is_read_at_import

Statement = tuple[int, str]
"""The line and the text of a statement."""

_DYNAMO = (0, "import torch._dynamo")
"""What DistributedDataParallel's constructor executes: 829 modules, about a second (torch 2.13)."""

_RUNS_A_THREAD = "monarch"
"""A package that ranks cannot share: that is known before half a second is spent on its import."""

_USES_DYNAMO = (b"DistributedDataParallel", b"accelerate")
"""Texts in a program that constructs one."""

_SETS_UP_DYNAMO = (b"TORCHDYNAMO", b"TORCHINDUCTOR", b"TORCH_COMPILE")
"""Texts in a program that sets variables which that import reads."""


class Leading(NamedTuple):
    """The leading statements of a program, and its first other statement, with file and line; empty if it has none."""

    statements: tuple[Statement, ...]
    end: str


def leading_statements(mode: str, target: str, folder: str, preloaded: Collection[str]) -> Leading:
    """Return the leading statements of a Python program, up to the last one that imports other than ``preloaded``.

    The import of ``torch._dynamo`` is added for a program whose ranks would execute it when they begin to train.

    Args:
        mode: how the program is run: ``script`` or ``module``; any other has no leading statements.
        target: the path of the script, or the name of the module.
        folder: the working folder.
        preloaded: packages that the zygote has imported in any case.
    """
    path = source_path(mode, target, folder)
    source = _read(path)
    if not source.strip():
        return Leading((), f"{target}: Python executes other files first, or no file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program prints its own
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Leading((), "")  # the program reports it, if its interpreter finds it wrong, too
    # A folder without ``__init__.py`` does not come before an installed package.
    own = {module.name for module in pkgutil.iter_modules([program_folder(mode, target, folder)])}
    statements, end, other = list[Statement](), 0, ""
    for line, text, package in _leading(tree, own):
        if package is None:
            first = text.partition("\n")[0]
            other = f"{os.path.basename(path)}:{line} {first[:60]}: the first statements, which ranks share, end here"
            break
        statements.append((line, text))
        if package and package not in preloaded and package not in sys.stdlib_module_names:
            end = len(statements)
    is_dynamo_used = any(text in source for text in _USES_DYNAMO) and not any(
        text in source for text in _SETS_UP_DYNAMO
    )
    is_dynamo_used = is_dynamo_used and "torch" in preloaded
    return Leading((*statements, _DYNAMO) if is_dynamo_used else tuple(statements[:end]), other)


def program_folder(mode: str, target: str, folder: str) -> str:
    """Return the folder that a Python program puts first in ``sys.path``; arguments as for ``leading_statements``."""
    return os.path.dirname(os.path.realpath(os.path.join(folder, target))) if mode == "script" else folder


def source_path(mode: str, target: str, folder: str) -> str:
    """Return the path of the program's source; empty if it is not a file, or may be preceded by other statements."""
    if mode == "script":
        return os.path.join(folder, target)
    if mode != "module":
        return ""
    *packages, name = target.split(".")
    for package in packages:
        folder = os.path.join(folder, package)
        if _read(os.path.join(folder, "__init__.py")).strip():
            return ""  # Python executes it before the program
    return os.path.join(folder, f"{name}.py")


def _read(path: str) -> bytes:
    if path.endswith(".py") and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read()
    return b""


def _leading(tree: ast.Module, own: Collection[str]) -> Iterator[tuple[int, str, str | None]]:
    """Yield the line and the text of each leading statement, and the package that it imports, if any.

    The first other statement has None.
    """
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    package = alias.name.partition(".")[0]
                    is_other = package in own or package == _RUNS_A_THREAD
                    yield node.lineno, ast.unparse(ast.Import([alias])), None if is_other else package
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] not in {*own, _RUNS_A_THREAD}:
                yield node.lineno, ast.unparse(node), module.partition(".")[0]
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name()], value=value) if _is_constant(value):
                pass
            case (
                ast.Assign(
                    targets=[ast.Subscript(value=environ, slice=ast.Constant(value=str(name)))],
                    value=ast.Constant(value=str()),
                )
                | ast.Expr(
                    value=ast.Call(
                        func=ast.Attribute(value=environ, attr="setdefault"),
                        args=[ast.Constant(value=str(name)), ast.Constant(value=str())],
                        keywords=[],
                    )
                )
            ) if ast.unparse(environ) == "os.environ" and not is_read_at_import(name):
                yield node.lineno, ast.unparse(node), ""
            case _:
                yield node.lineno, ast.unparse(node), None


def _is_constant(node: ast.expr) -> bool:
    parts = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.operator, ast.unaryop)
    return all(isinstance(part, (*parts, ast.expr_context, ast.BinOp)) for part in ast.walk(node))
