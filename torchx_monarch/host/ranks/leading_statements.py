# SPDX-License-Identifier: BSD-3-Clause
"""Find the leading statements of a program: those that the zygote can execute before its ranks are forked.

They are the statements before the first one that may change what a later import does (``pure_statements``), but for
environment variables that are set to constants. So a fork that finds these imports executed is in the state of an
interpreter that has executed them itself. Modules of the user's own are read and not imported: their leading statements
are executed in their place.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torchx_monarch.host.ranks.preloaded_modules import is_read_at_import
from torchx_monarch.host.ranks.pure_statements import PureStatements, catches_errors


class Statement(NamedTuple):
    """A statement, with its file and line; that of one which the host adds is 0."""

    path: str
    line: int
    text: str


_DYNAMO = "torch._dynamo"
"""What DistributedDataParallel's constructor imports: 829 modules, about a second (torch 2.13)."""

_COMPILER = "torch._inductor.compile_fx"
"""What ``torch.compile`` imports as well: 480 modules, half a second (torch 2.13)."""

_RUNS_A_THREAD = "monarch"
"""A package that ranks cannot share: that is known before half a second is spent on its import."""

_USES_DYNAMO = (b"DistributedDataParallel", b"accelerate", b"fully_shard", b"torch.compile")
"""Texts in a program that calls what imports it."""

_SETS_UP_DYNAMO = (b"TORCHDYNAMO", b"TORCHINDUCTOR", b"TORCH_COMPILE")
"""Texts in a program that sets variables which that import reads."""

NOT_IN_TORCH = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed._tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "torch.nn.attention.varlen",
)
"""Modules of torch, with those below them, that `import torch` does not import, and of which each imports hundreds:
520 to 841 in torch 2.13, in half a second to one. Others are not worth a zygote that serves one program alone."""


class Leading(NamedTuple):
    """The leading statements of a program, and its first other statement, with file and line; empty if it has none."""

    statements: tuple[Statement, ...]
    end: str


def leading_statements(mode: str, target: str, folder: str, preloaded: Collection[str]) -> Leading:
    """Return the leading statements of a Python program, up to the last one that imports other than ``preloaded``.

    Where they import a module of the user's own, that is read as well: its leading statements are the program's. The
    import of those of ``NOT_IN_TORCH`` is added that ranks would execute otherwise, or when they begin to train.

    Args:
        mode: how the program is run: ``script`` or ``module``; any other has no leading statements.
        target: the path of the script, or the name of the module.
        folder: the working folder.
        preloaded: packages that the zygote has imported in any case.
    """
    key = mode, target, folder, *sorted(preloaded)
    if key not in _found or any(_stamp(path) != stamp for path, stamp in _found[key][0].items()):
        reader = _Reader(program_folder(mode, target, folder))
        leading = _read_all(reader, mode, target, folder, preloaded)
        _found.clear()
        _found[key] = reader.stamps, leading
    return _found[key][1]


_found: dict[tuple[str, ...], tuple[dict[str, object], Leading]] = {}
"""What was found last, and the stamps of what was read for it: a third of a second for 90 files, in each attempt."""


def _stamp(path: str) -> object:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None


def _read_all(reader: _Reader, mode: str, target: str, folder: str, preloaded: Collection[str]) -> Leading:
    path = source_path(mode, target, folder)
    package, _, module = target.rpartition(".") if mode == "module" else ("", "", "")
    if os.path.basename(path) == "__main__.py" and mode == "module":
        package = target
    found = [*reader.module(package), *reader.file(path, package, is_program=True)]
    if path not in reader.trees and not reader.end:
        return Leading((), f"{target}: no Python source was found")
    last = max((at for at, (_, names) in enumerate(found, 1) if _is_slow(names, preloaded)), default=0)
    heavy = {*reader.heavy, *([_DYNAMO] if any(text in reader.source for text in _USES_DYNAMO) else [])}
    if heavy and "torch" in preloaded and not any(text in reader.source for text in _SETS_UP_DYNAMO):
        ahead = [", ".join(sorted(heavy)), *([_COMPILER] if b"torch.compile" in reader.source else [])]
        statements = [*(statement for statement, _ in found), *(Statement("", 0, f"import {names}") for names in ahead)]
        return Leading(tuple(statements), reader.end)
    return Leading(tuple(statement for statement, _ in found[:last]), reader.end)


def _is_slow(names: Sequence[str], preloaded: Collection[str]) -> bool:
    """Return whether the zygote is to import modules, rather than each rank."""
    packages = {name.partition(".")[0] for name in names}
    return bool(packages - {*preloaded} - sys.stdlib_module_names) or bool(_heavy(names))


def _heavy(names: Sequence[str]) -> set[str]:
    """Return what the import of a module, or of names in it, imports of ``NOT_IN_TORCH``."""
    heavy = {heavy for heavy in NOT_IN_TORCH for name in names if f"{name}.".startswith(f"{heavy}.")}
    return heavy | {name for name in names[:1] for package in heavy if name.startswith(package)}


def program_folder(mode: str, target: str, folder: str) -> str:
    """Return the folder that a Python program puts first in ``sys.path``; arguments as for ``leading_statements``."""
    return os.path.dirname(os.path.realpath(os.path.join(folder, target))) if mode == "script" else folder


def source_path(mode: str, target: str, folder: str) -> str:
    """Return the path of the program's source; empty if it is not a file."""
    if mode == "script":
        return os.path.join(folder, target)
    if mode != "module":
        return ""
    path = os.path.join(folder, *target.split("."))
    return os.path.join(path, "__main__.py") if os.path.isdir(path) else f"{path}.py"


class _Reader:
    """Read leading statements, each with the modules that it imports, in the order in which they are executed.

    Attributes:
        source: all that was read.
        end: the first other statement; empty before it.
        heavy: what is imported of ``NOT_IN_TORCH`` before and after that.
        stamps: when files and their folders, which may not exist, were changed.
        trees: the syntax trees of the files that were read.

    Args:
        folder: where Python looks first for modules, which are the user's own.
    """

    def __init__(self, folder: str) -> None:
        self.source = b""
        self.end = ""
        self.heavy: set[str] = set()
        self.stamps = {folder: _stamp(folder)}
        self._folder = folder
        # A folder without ``__init__.py`` does not come before an installed package.
        self._own = {module.name for module in pkgutil.iter_modules([folder])}
        self.trees: dict[str, ast.Module] = {}
        self._pure: dict[str, PureStatements] = {}

    def module(self, name: str) -> Iterator[tuple[Statement, Sequence[str]]]:
        """Read what Python executes for the import of a module of the user's own, and of the packages around it."""
        parts = name.split(".") if name else []
        for count in range(1, len(parts) + 1):
            path = os.path.join(self._folder, *parts[:count])
            if os.path.isdir(path):
                yield from self.file(os.path.join(path, "__init__.py"), ".".join(parts[:count]))
            else:
                yield from self.file(f"{path}.py", ".".join(parts[: count - 1]))

    def file(self, path: str, package: str, is_program: bool = False) -> Iterator[tuple[Statement, Sequence[str]]]:
        """Read a file whose relative imports are from a package."""
        if path in self.trees:
            return
        self.stamps.update({place: _stamp(place) for place in (path, os.path.dirname(path))})
        source = _read(path)
        self.source += source
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the program prints its own
                tree = self.trees[path] = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = self.trees[path] = ast.Module([], [])  # the program reports it, if its interpreter finds it wrong
            self._end(path, 1, "it is not read")
        if not source and not path.endswith("__init__.py"):
            del self.trees[path]
            return
        if not self.end:
            self._pure[path] = PureStatements(tree, is_program)
        for node in tree.body:
            yield from self._statement(path, package, node)

    def _statement(self, path: str, package: str, node: ast.stmt) -> Iterator[tuple[Statement, Sequence[str]]]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from self._import(path, node.lineno, ast.Import([alias]), [alias.name])
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.ImportFrom() if modules := _modules(node, package):
                yield from self._import(path, node.lineno, node, modules)
            case _ if self.end or self._pure[path].has(node):
                pass
            case ast.Try() if attempted := self._attempted(node, self._pure[path]):
                yield Statement(path, node.lineno, ast.unparse(node)), attempted
            case _ if _sets_a_variable(node):
                yield Statement(path, node.lineno, ast.unparse(node)), ()
            case _:
                self._end(path, node.lineno, ast.unparse(node))

    def _import(
        self, path: str, line: int, node: ast.stmt, names: Sequence[str]
    ) -> Iterator[tuple[Statement, Sequence[str]]]:
        """Yield an import, or what the user's own modules import that it names."""
        package = names[0].partition(".")[0]
        if package == _RUNS_A_THREAD:
            self._end(path, line, ast.unparse(node))
        elif package in self._own:
            yield from self.module(names[0])
            place = os.path.join(self._folder, *names[0].split("."))
            init = self.trees.get(os.path.join(place, "__init__.py"))
            bound = _bound(init) if init is not None else set()
            for name in names[1:] if os.path.isdir(place) else ():
                if self._is_file(name) and name.rpartition(".")[2] not in bound:
                    yield from self.module(name)
            if not self._is_file(names[0]) and not os.path.isdir(place):
                self._end(path, line, ast.unparse(node))  # such as an extension module
        else:
            self.heavy |= _heavy(names)
            if not self.end:
                yield Statement(path, line, ast.unparse(node)), names

    def _attempted(self, node: ast.Try, pure: PureStatements) -> list[str]:
        """Return what is imported by an attempt to import installed packages; none if it does anything else."""
        handled = [statement for handler in node.handlers for statement in handler.body]
        names: list[str] = []
        for part in (*node.body, *handled):
            match part:
                case ast.Import(names=imported):
                    names += [alias.name for alias in imported]
                case ast.ImportFrom(level=0):
                    names += _modules(part, "")
                case _ if not pure.has(part):
                    return []
        is_simple = catches_errors(node) and not node.orelse and not node.finalbody
        packages = {name.partition(".")[0] for name in names}
        return names if is_simple and packages.isdisjoint((*self._own, _RUNS_A_THREAD)) else []

    def _is_file(self, name: str) -> bool:
        path = os.path.join(self._folder, *name.split("."))
        return os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py"))

    def _end(self, path: str, line: int, text: str) -> None:
        if self.end:
            return
        first, shown = text.partition("\n")[0], os.path.relpath(path, self._folder)
        shown = os.path.basename(path) if shown.startswith("..") else shown
        self.end = f"{shown}:{line} {first[:60]}: the first statements, which ranks share, end here"


def _read(path: str) -> bytes:
    if path.endswith(".py") and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read()
    return b""


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that a module binds: `from package import name` imports no module for these."""
    names = {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", [])}
    names |= {str(getattr(node, "name", "")) for node in tree.body}
    return names | {part.id for node in tree.body for part in ast.walk(node) if isinstance(part, ast.Name)}


def _modules(node: ast.ImportFrom, package: str) -> list[str]:
    """Return the module from which names are imported, and the names as modules; nothing outside a package."""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return []
    around = parts[: len(parts) - node.level + 1] if node.level else []
    base = ".".join([*around, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _sets_a_variable(node: ast.stmt) -> bool:
    """Return whether a statement sets an environment variable to a constant that torch does not read at import."""
    match node:
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
        ):
            return ast.unparse(environ) == "os.environ" and not is_read_at_import(name)
    return False
