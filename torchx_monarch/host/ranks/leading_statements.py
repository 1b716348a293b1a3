# SPDX-License-Identifier: BSD-3-Clause
"""Find the leading statements of a program: those that the zygote can execute before its ranks are forked.

They are the statements before the first one that does anything but import modules, assign constants to names, define
functions, or set environment variables to constants. Whatever the program does later cannot change what these imports
do, so a fork that finds them executed is in the state of an interpreter that has executed them itself. Modules of the
user's own are read and not imported: their leading statements are executed in their place.
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


class Statement(NamedTuple):
    """A statement, with its file and line; that of one which the host adds is 0."""

    path: str
    line: int
    text: str


_DYNAMO = Statement("", 0, "import torch._dynamo")
"""What DistributedDataParallel's constructor executes: 829 modules, about a second (torch 2.13)."""

_RUNS_A_THREAD = "monarch"
"""A package that ranks cannot share: that is known before half a second is spent on its import."""

_USES_DYNAMO = (b"DistributedDataParallel", b"accelerate", b"fully_shard", b"torch.compile(")
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
)
"""Modules of torch, with those below them, that `import torch` does not import, and of which each imports hundreds:
520 to 841 in torch 2.13, in half a second to one. Others are not worth a zygote that serves one program alone."""

_OF_NO_EFFECT = frozenset(("logging.getLogger", "time.time", "time.monotonic", "time.perf_counter"))
"""Functions that change no later import. Each rank calls them itself."""

_BLAND = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp)
"""What defaults and annotations of a function may consist of that does not end the leading statements."""


class Leading(NamedTuple):
    """The leading statements of a program, and its first other statement, with file and line; empty if it has none."""

    statements: tuple[Statement, ...]
    end: str


def leading_statements(mode: str, target: str, folder: str, preloaded: Collection[str]) -> Leading:
    """Return the leading statements of a Python program, up to the last one that imports other than ``preloaded``.

    Where they import a module of the user's own, that is read as well: its leading statements are the program's. The
    import of ``torch._dynamo`` is added for a program whose ranks would execute it when they begin to train.

    Args:
        mode: how the program is run: ``script`` or ``module``; any other has no leading statements.
        target: the path of the script, or the name of the module.
        folder: the working folder.
        preloaded: packages that the zygote has imported in any case.
    """
    reader, path = _Reader(program_folder(mode, target, folder)), source_path(mode, target, folder)
    package, _, module = target.rpartition(".") if mode == "module" else ("", "", "")
    if os.path.basename(path) == "__main__.py" and mode == "module":
        package = target
    found = [*reader.module(package), *reader.file(path, package)]
    if not reader.has_read(path) and not reader.end:
        return Leading((), f"{target}: no Python source was found")
    last = max((at for at, (_, names) in enumerate(found, 1) if _is_slow(names, preloaded)), default=0)
    is_dynamo_used = any(text in reader.source for text in _USES_DYNAMO) and "torch" in preloaded
    if is_dynamo_used and not any(text in reader.source for text in _SETS_UP_DYNAMO):
        return Leading((*(statement for statement, _ in found), _DYNAMO), reader.end)
    return Leading(tuple(statement for statement, _ in found[:last]), reader.end)


def _is_slow(names: Sequence[str], preloaded: Collection[str]) -> bool:
    """Return whether the zygote is to import modules, rather than each rank."""
    packages = {name.partition(".")[0] for name in names}
    return bool(packages - {*preloaded} - sys.stdlib_module_names) or any(
        f"{name}.".startswith(tuple(f"{heavy}." for heavy in NOT_IN_TORCH)) for name in names
    )


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

    Args:
        folder: where Python looks first for modules, which are the user's own.
    """

    def __init__(self, folder: str) -> None:
        self.source = b""
        self.end = ""
        self._folder = folder
        # A folder without ``__init__.py`` does not come before an installed package.
        self._own = {module.name for module in pkgutil.iter_modules([folder])}
        self._trees: dict[str, ast.Module] = {}

    def has_read(self, path: str) -> bool:
        return path in self._trees

    def module(self, name: str) -> Iterator[tuple[Statement, Sequence[str]]]:
        """Read what Python executes for the import of a module of the user's own, and of the packages around it."""
        parts = name.split(".") if name else []
        for count in range(1, len(parts) + 1):
            path = os.path.join(self._folder, *parts[:count])
            if os.path.isdir(path):
                yield from self.file(os.path.join(path, "__init__.py"), ".".join(parts[:count]))
            else:
                yield from self.file(f"{path}.py", ".".join(parts[: count - 1]))

    def file(self, path: str, package: str) -> Iterator[tuple[Statement, Sequence[str]]]:
        """Read a file whose relative imports are from a package."""
        if self.end or path in self._trees:
            return
        source = _read(path)
        self.source += source
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the program prints its own
                tree = self._trees[path] = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = self._trees[path] = ast.Module([], [])  # the program reports it, if its interpreter finds it wrong
            self._end(path, 1, "it is not read")
        if not source and not path.endswith("__init__.py"):
            del self._trees[path]
            return
        for node in tree.body:
            if self.end:
                return
            yield from self._statement(path, package, node)

    def _statement(self, path: str, package: str, node: ast.stmt) -> Iterator[tuple[Statement, Sequence[str]]]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from self._import(path, node.lineno, ast.Import([alias]), [alias.name])
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".") if package else []
                if level > len(parts):
                    self._end(path, node.lineno, ast.unparse(node))
                    return
                around = parts[: len(parts) - level + 1] if level else []
                base = ".".join([*around, *([module] if module else [])])
                yield from self._import(path, node.lineno, node, [base, *(f"{base}.{alias.name}" for alias in names)])
            case _ if (executed := _is_leading(node)) is not None:
                if executed:
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
        elif package not in self._own:
            yield Statement(path, line, ast.unparse(node)), names
        else:
            yield from self.module(names[0])
            init = self._trees.get(os.path.join(self._folder, *names[0].split("."), "__init__.py"))
            bound = _bound(init) if init is not None else set()
            for name in names[1:] if init is not None else ():
                if self._is_file(name) and name.rpartition(".")[2] not in bound:
                    yield from self.module(name)
            if not self.end and not self._is_file(names[0]):
                self._end(path, line, ast.unparse(node))  # such as an extension module

    def _is_file(self, name: str) -> bool:
        path = os.path.join(self._folder, *name.split("."))
        return os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py"))

    def _end(self, path: str, line: int, text: str) -> None:
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


def _is_leading(node: ast.stmt) -> bool | None:
    """Return whether to execute a statement that is no import; None if it may change a later import otherwise."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return False
        case ast.Assign(targets=[ast.Name()], value=value) if _is_constant(value) or _is_of_no_effect(value):
            return False
        case ast.FunctionDef(decorator_list=[], args=args) | ast.AsyncFunctionDef(decorator_list=[], args=args):
            given = [*args.defaults, *filter(None, args.kw_defaults), *([node.returns] if node.returns else [])]
            declared = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
            given += [argument.annotation for argument in declared if argument is not None and argument.annotation]
            return False if all(map(_is_bland, given)) else None
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return False
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
            return True
    return None


def _is_constant(node: ast.expr) -> bool:
    parts = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.operator, ast.unaryop)
    return all(isinstance(part, (*parts, ast.expr_context, ast.BinOp)) for part in ast.walk(node))


def _is_of_no_effect(node: ast.expr) -> bool:
    """Return whether an expression is a call such as ``logging.getLogger(__name__)``."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in _OF_NO_EFFECT
        and not node.keywords
        and all(isinstance(argument, (ast.Constant, ast.Name)) for argument in node.args)
    )


def _is_bland(node: ast.expr) -> bool:
    return all(isinstance(part, (*_BLAND, ast.expr_context, ast.operator, ast.unaryop)) for part in ast.walk(node))
