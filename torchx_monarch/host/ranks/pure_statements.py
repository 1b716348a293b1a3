# SPDX-License-Identifier: BSD-3-Clause
"""Decide whether a statement that is no import changes what a later import does.

Definitions and assignments of names do not, if what Python evaluates for them are constants, names, attributes and
calls of functions that only return a value, of which no import changes any. A class is remembered by those that it is
derived from at most.
"""

from __future__ import annotations

import ast
import builtins

_PURE_MODULES = "abc collections contextlib dataclasses enum itertools math os.path pathlib typing typing_extensions"
"""Modules whose functions and classes only return a value. Each rank calls them itself."""

_PURE = {
    "builtins": "bool classmethod dict float frozenset int len list property range set staticmethod str tuple",
    "contextvars": "ContextVar",
    "functools": "cache lru_cache partial wraps",
    "importlib.metadata": "version",
    "logging": "getLogger",
    "re": "compile",
    "threading": "Lock RLock local",
    "time": "monotonic perf_counter time",
    "torch": "device enable_grad inference_mode no_grad",
}
"""Others, by their modules."""

_CHANGED = ("os.environ", "sys.meta_path", "sys.modules", "sys.path", "warnings.filters")
"""What the import of a package may change, and ranks find changed before they execute it."""

_METHODS = ("absolute", "getter", "is_available", "resolve", "setter")
"""Methods of paths and properties, and functions of modules, that only return a value."""

_CAUGHT = ("AttributeError", "Exception", "ImportError", "ModuleNotFoundError")
"""What an ``except`` clause may name that a stopped import passes through."""


class PureStatements:
    """The statements of a module that change no later import.

    Args:
        tree: the module.
        is_program: whether it is executed as ``__main__``.
    """

    def __init__(self, tree: ast.Module, is_program: bool) -> None:
        self._is_program = is_program
        self._origins = {name: f"builtins.{name}" for name in dir(builtins)}
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self._origins.pop(name, None)
        for node in tree.body:
            match node:
                case ast.Import(names=names):
                    tops = {alias.name.partition(".")[0] for alias in names}
                    self._origins.update({alias.asname: alias.name for alias in names if alias.asname})
                    self._origins.update({top: top for top in tops})
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    self._origins.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in names})

    def has(self, node: ast.stmt) -> bool:
        """Return whether a statement changes no later import."""
        match node:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return True
            case ast.Assign(targets=targets, value=value):
                parts = [part for target in targets for part in ast.walk(target)]
                names = (ast.Name, ast.Tuple, ast.expr_context)
                return all(isinstance(part, names) for part in parts) and self._is_pure(value)
            case ast.AnnAssign(target=ast.Name(), annotation=annotation, value=value):
                return self._is_pure(annotation) and (value is None or self._is_pure(value))
            case ast.FunctionDef(decorator_list=decorators) | ast.AsyncFunctionDef(decorator_list=decorators):
                args = node.args
                declared = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
                annotations = [argument.annotation for argument in declared if argument is not None]
                evaluated = (*args.defaults, *args.kw_defaults, *annotations, node.returns)
                return self._are_pure(decorators) and all(self._is_pure(part) for part in evaluated if part)
            case ast.ClassDef(bases=bases, keywords=keywords, decorator_list=decorators, body=body):
                metaclasses = [keyword.value for keyword in keywords if keyword.arg == "metaclass"]
                is_pure = all(map(self._is_pure, (*bases, *(keyword.value for keyword in keywords))))
                return is_pure and self._are_pure([*decorators, *metaclasses]) and all(map(self._is_of_class, body))
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
                return True
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__")), orelse=[]):
                return not self._is_program
            case ast.Try(body=body, handlers=handlers, orelse=[], finalbody=[]):
                handled = [statement for handler in handlers for statement in handler.body]
                return catches_errors(node) and all(map(self.has, (*body, *handled)))
        return False

    def _is_of_class(self, node: ast.stmt) -> bool:
        return getattr(node, "name", "") != "__init_subclass__" and self.has(node)

    def _are_pure(self, decorators: list[ast.expr]) -> bool:
        return all(
            self._is_pure(each) if isinstance(each, ast.Call) else self._is_pure_call(each) for each in decorators
        )

    def _is_pure(self, expression: ast.expr) -> bool:
        todo: list[ast.AST] = [expression]
        for node in todo:
            todo += () if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node)
        calls = [node.func for node in todo if isinstance(node, ast.Call)]
        names = (self._origin(node) for node in todo if isinstance(node, (ast.Name, ast.Attribute)))
        return all(map(self._is_pure_call, calls)) and not any(name in _CHANGED for name in names)

    def _is_pure_call(self, called: ast.expr) -> bool:
        match called:
            case ast.Attribute(value=value, attr=attr) if isinstance(value, ast.Constant) or attr in _METHODS:
                return True
        module, _, name = self._origin(called).rpartition(".")
        return module in _PURE_MODULES.split() or name in _PURE.get(module, "").split()

    def _origin(self, node: ast.expr) -> str:
        """Return the name of something imported, with that of its module."""
        first, dot, rest = ast.unparse(node).partition(".")
        return f"{self._origins.get(first, '')}{dot}{rest}"


def catches_errors(node: ast.Try) -> bool:
    """Return whether a statement catches named errors alone, so that a stopped import passes through it."""
    types = [handler.type for handler in node.handlers]
    names = [part for kind in types for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return all(isinstance(name, ast.Name) and name.id in _CAUGHT for name in names)
