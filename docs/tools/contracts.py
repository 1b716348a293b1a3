# SPDX-License-Identifier: BSD-3-Clause
"""Fail if the code has another number of contracts, or of places that hold one idea, than docs/architecture/README.md
says: ``python -m docs.tools.contracts``, a part of ``make lint``. A commit that changes a number there says why.

A contract is what two parts of the code must agree on; a change that adds one touches both. Places are found by their
types and names, so that a new one is counted before somebody has to look for it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torchx_monarch.backends.core.backend import Capabilities
from torchx_monarch.backends.core.snapshot import ReplicaSnapshot
from torchx_monarch.controller.host_messages import REQUESTS
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.role_spec import RoleSpec

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "architecture" / "README.md"
_PACKAGE = _ROOT / "torchx_monarch"
_ROW = re.compile(r"^\| ([\w ,`]+) \| ([\d,]+) \|", re.MULTILINE)
_COLLECTION = re.compile(
    r"(dict|set|frozenset|list|tuple|deque|Mapping|Sequence|Collection)\[(int|Registration|Member)\b"
    r"(?!, (_Waiting|HostCall))|set\(replicas\)"  # those are by rank, or by the number of a call
)
_NOT_OF_HOSTS = ("Members.", "Attempt.", "SlowWatch.")
"""The one table of hosts, and what has numbers of ranks."""


def _modules(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((_PACKAGE / folder).rglob("*.py"))


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _requests() -> set[str]:
    return set(REQUESTS)


def _greetings() -> set[str]:
    """Return what ``HostNetwork.handlers`` gets: keys of dictionaries of methods, and names of changes."""
    found = set[str]()
    for path in _modules("controller", "host"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict) and all(ast.unparse(value).startswith("self._") for value in node.values):
                found.update(str(key.value) for key in node.keys if isinstance(key, ast.Constant))
            elif isinstance(node, ast.Subscript) and _is_handlers(node.value) and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".handlers.update"):
                found.update(keyword.arg for keyword in node.keywords if keyword.arg)
    return found


def _is_handlers(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "handlers"


def _orders() -> set[str]:
    return set(re.findall(r'\bop == "(\w+)"', (_PACKAGE / "host/ranks/zygote_main.py").read_text()))


def _variables() -> set[str]:
    return {name for path in _modules("") for name in re.findall(r'"(MONARCH_[A-Z_]+)"', path.read_text())}


def _attributes(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield the attributes of classes, as ``Class.name``, with their types, or what they are at first.

    A frozen value is passed on, and not a place where something is kept.
    """
    for path in _modules(*folders):
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            if any("frozen=True" in ast.unparse(decorator) for decorator in kind.decorator_list):
                continue
            for node in ast.walk(kind):
                if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                    continue
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                found = node.annotation if isinstance(node, ast.AnnAssign) else node.value
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield f"{kind.name}.{target.attr}", ast.unparse(found)
                elif isinstance(target, ast.Name) and node in kind.body:
                    yield f"{kind.name}.{target.id}", ast.unparse(found)


def _of_hosts() -> set[str]:
    return {
        name
        for name, type_name in _attributes("controller", "transport")
        if _COLLECTION.match(type_name) and not name.startswith(_NOT_OF_HOSTS)
    }


def _of_attempts() -> set[str]:
    return {
        name
        for name, type_name in _attributes("controller", "host", "model")
        if "attempt" in name.partition(".")[2].lower() or "Attempt" in type_name
    }


def _of_phases() -> set[str]:
    return {
        path.relative_to(_PACKAGE).as_posix()
        for path in _modules("")
        if re.search(r'\bevent\["kind"\] (==|!=|in|not in) (?!event)', path.read_text())
    }


_COUNTED: dict[str, Callable[[], set[str]]] = {
    "requests of the controller": _requests,
    "greetings": _greetings,
    "orders to a zygote": _orders,
    "variables `MONARCH_`": _variables,
    "options of a host process": lambda: _fields(HostSpec),
    "fields of `Capabilities`": lambda: _fields(Capabilities),
    "fields of `RoleSpec`": lambda: _fields(RoleSpec),
    "fields of `ReplicaSnapshot`": lambda: _fields(ReplicaSnapshot),
    "places of hosts": _of_hosts,
    "places of an attempt": _of_attempts,
    "places of a phase": _of_phases,
}


def main() -> int:
    """Print each number that differs from that of the page, with what was counted; return the exit code."""
    stated = dict(_ROW.findall(_PAGE.read_text()))
    wrong = 0
    for what, count in _COUNTED.items():
        found = sorted(count())
        if stated.get(what) != f"{len(found):,}":
            wrong = 1
            text = f"{len(found)} in the code, {stated.get(what, 'none')} in docs/architecture/README.md"
            print(f"{what}: {text}: {', '.join(found)}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
