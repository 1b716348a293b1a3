# SPDX-License-Identifier: BSD-3-Clause
"""Compare what two processes have after they have executed the same import.

``zygote_main`` runs this file: it imports the standard library alone. Both processes are forks of one, so what was made
before has the same addresses in both. No method is called that a Python class defines: it may do anything.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import gc
import os
import random
import re
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

_SIMPLE = (int, str, bytes, uuid.UUID, type(None))

_SHARED_NAMES = {"__doc__", "__warningregistry__", "_pid", "_lastpid", "_rng_pid", "authkey"}
"""Names of values that no program uses, or that are compared with the process id before they are. Each rank draws the
key of a process anew."""

_ADDRESS = re.compile(r"0x[0-9a-f]+")

_CONTAINERS = (list, tuple, dict, set, functools.partial, type(len), type(functools.lru_cache(len)))


class ImportedValues:
    """The values of modules and environment variables, and of the objects that an import has made.

    Args:
        is_renewed: says whether an object is a random generator that is seeded anew in each fork.
        made: those objects.
        ignored: objects that, with what they hold, are not the import's.
        shared: packages and modules that may have other values in each process.
    """

    def __init__(
        self,
        is_renewed: Callable[[object], bool],
        made: Collection[object],
        ignored: Collection[object],
        shared: Collection[str],
    ) -> None:
        self._is_renewed = is_renewed
        self._is_shared = functools.cache(lambda name: not {name, name.partition(".")[0]}.isdisjoint(shared))
        self._made = made
        self._addresses = {*map(id, made)}
        modules = [module for name, module in list(sys.modules.items()) if self._is_shared(name)]
        self._ignored, todo = set[int](), [*ignored, *map(vars, modules)]
        for each in todo:
            kind = each if issubclass(type(each), type) else type(each)
            if id(each) not in self._ignored and (kind in _CONTAINERS or self._is_shared(_home(kind))):
                todo += gc.get_referents(each)
            self._ignored.add(id(each))

    def digest(self) -> bytes:
        """Return what the other process needs for ``difference``."""
        return array.array("q", (number for *_, number in self._values())).tobytes()

    def difference(self, digest: bytes, renewed: Collection[tuple[int, str]]) -> str:
        """Return the name of a value that the other process does not have; empty if it has all.

        ``renewed`` are the global names that may differ, each with the ``id`` of the names of its module.
        """
        others = collections.Counter(array.array("q", digest))
        for holder, name, number in self._values():
            if others[number]:
                others[number] -= 1
            elif (id(holder), name) not in renewed:
                module, kind = _module(holder), type(holder)
                return f"{module}.{name}" if module else f"an object of {kind.__module__}.{kind.__qualname__}"
        return "" if others.total() <= len(renewed) else "what it makes"

    def _values(self) -> Iterator[tuple[Any, str, int]]:
        """Yield each value: its holder, its name, and a number that is equal for equal ones."""
        known = set(self._ignored)
        modules = [vars(module) for module in list(sys.modules.values()) if issubclass(type(module), types.ModuleType)]
        for holder in (*modules, vars(os.environ)["_data"], *self._made):
            is_shared = self._is_shared(_home(type(holder))) or self._is_renewed(holder)
            if id(holder) not in known and not is_shared:
                known.add(id(holder))
                place = _module(holder) or type(holder).__qualname__
                for name, value in self._held(holder):
                    if name not in _SHARED_NAMES:
                        yield holder, name, hash((place, name, value))

    def _held(self, holder: Any) -> Iterator[tuple[str, Any]]:
        """Yield names and values that an object holds, other than objects that the garbage collector knows.

        An object of a C library has the value that it shows.
        """
        kind, parts = type(holder), list[tuple[Any, Any]]()
        if issubclass(kind, dict):
            # The key of a weak reference may be the address of its object.
            items = [item for item in list(dict.items(holder)) if type(item[1]) is not weakref.ref]
            parts = [(name, part) for name, value in items for part in (name, value)]
        elif issubclass(kind, _generators()):
            with contextlib.suppress(NotImplementedError):  # of the system's
                parts = [("", repr(holder.getstate() if issubclass(kind, random.Random) else holder.state))]
        elif kind is getattr(sys.modules.get("multiprocessing.util"), "Finalize", ""):
            parts = [("", part) for part in vars(holder).values()]  # its _pid, too: another process does not execute it
        elif kind is not uuid.UUID:  # a value of those that hold it
            parts = [("", part) for part in gc.get_referents(holder)]
        for key, part in parts:
            name, kind = key if type(key) is str else "", type(part)
            if issubclass(kind, _SIMPLE):
                simple: Any = kind if kind in _SIMPLE else next(base for base in _SIMPLE if issubclass(kind, base))
                if kind is not int or part not in self._addresses:
                    yield name, simple.__hash__(part)
            elif kind in (tuple, dict, frozenset) and not gc.is_tracked(part):
                yield from ((name, value) for _, value in self._held(part))
            elif not gc.is_tracked(part) and kind is not types.CodeType and "__slots__" not in vars(kind):
                with contextlib.suppress(Exception):  # a table of a C library may have no order
                    yield name, "".join(sorted(_ADDRESS.sub("", repr(part))))


def _module(holder: Any) -> str:
    """Return the name of the module whose names an object has; else empty."""
    return str(holder["__name__"]) if type(holder) is dict and "__spec__" in holder else ""


def _generators() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    return (random.Random, numpy.BitGenerator) if numpy else (random.Random,)


def _home(kind: Any) -> str:
    """Return the name of the module that has defined a class."""
    return str(vars(kind).get("__module__", ""))
