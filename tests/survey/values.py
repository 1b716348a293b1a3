# SPDX-License-Identifier: BSD-3-Clause
"""Write every value that the modules of this interpreter reach, by its path: the rest of a program of the survey.

The program is one import followed by this text: ``python PROGRAM FILE``. It reads FOLDER/wanted.json of the file's
folder: the names of the modules, and the paths to write, if not all.
"""

import contextlib
import gc
import json
import os
import re
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

_CPU_SECONDS = time.process_time()
"""What the interpreter and the import have taken."""

_DEPTH, _WIDTH = 6, 400
"""Steps from a module to a value, and elements of a container, at most."""

_SIMPLE = (bool, int, float, complex, str, bytes, bytearray, type(None))

_ADDRESSES = range(0x550000000000, 1 << 47)
_ADDRESS = re.compile(r"\b(0x[5-7][0-9a-f]{11}|(9[3-9]|1[0-4]\d)\d{12})\b")
"""Integers, and parts of texts, that may be addresses of objects."""

_BY_REPR = ("datetime", "decimal", "fractions", "pathlib", "pathlib._local", "uuid")
"""Modules whose objects are simple values, too."""

_STATES = {"random": "getstate", "numpy.random.mtrand": "get_state", "torch._C": "get_state"}
"""How the generators of modules give their state."""

_OF_A_MODULE = (
    "__builtins__",
    "__warningregistry__",
    "__cached__",
    "__file__",
    "__path__",
    "__spec__",
    "__loader__",
    "__doc__",
)


def _text(value: Any) -> str | None:
    """Return a simple value as a short text; None for any other."""
    kind = type(value)
    text = None
    if kind in _SIMPLE or (kind.__module__ in _BY_REPR and not kind.__name__.startswith("_")):
        text = repr(value)
    elif kind.__module__ in _STATES and hasattr(kind, _STATES[kind.__module__]):
        state = getattr(value, _STATES[kind.__module__])()
        text = repr(state.tolist() if hasattr(state, "tolist") else state)
    elif hasattr(kind, "random_raw") or hasattr(kind, "bit_generator"):  # generators of numpy
        text = repr(getattr(value, "bit_generator", value).state)
    elif kind.__name__ in ("ndarray", "Tensor", "Parameter") and value.nbytes < 1 << 20:
        text = repr(value.tolist())
    elif issubclass(kind, (set, frozenset)):
        elements = [element for element in value if type(element) in _SIMPLE]
        text = repr(sorted(repr(part) for part in elements if not (type(part) is int and part in _ADDRESSES)))
    if text is None:
        return None
    text = _ADDRESS.sub("an address", text)
    return text if len(text) < 120 else f"{text[:100]}… {hash(text):x}"  # PYTHONHASHSEED is 0


def _parts(value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield what a value consists of. No code of the value's class runs, for it may import, or make what it lacks."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, part in list(dict.items(value)):
            if type(key) in _SIMPLE and not (type(key) is int and key in _ADDRESSES):
                yield f"[{key!r:.60}]", part
    elif issubclass(kind, (list, tuple)):
        elements = (tuple if issubclass(kind, tuple) else list).__iter__(value)
        yield from ((f"[{number}]", part) for number, part in enumerate(elements))
    elif kind is types.FunctionType:
        yield from ((f"(default {number})", part) for number, part in enumerate(value.__defaults__ or ()))
        yield from ((f"(default {name})", part) for name, part in (value.__kwdefaults__ or {}).items())
        yield from ((f"(closure {number})", part) for number, part in enumerate(gc.get_referents(value.__closure__)))
    elif kind is types.CellType or kind.__name__ in ("_lru_cache_wrapper", "_lru_list_elem", "deque", "partial"):
        yield from ((f"<{number}>", part) for number, part in enumerate(gc.get_referents(value)))
    elif issubclass(kind, type):
        if value.__module__ in names:
            yield from ((f".{name}", part) for name, part in vars(value).items() if not name.startswith("__"))
        return
    if kind not in (types.ModuleType, types.BuiltinFunctionType):
        for base in () if kind is types.FunctionType else kind.__mro__:
            for name, descriptor in vars(base).items():
                if type(descriptor) is types.MemberDescriptorType:
                    with contextlib.suppress(AttributeError):  # of an empty slot
                        yield f".{name}", descriptor.__get__(value)
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except (AttributeError, TypeError):
            return
        if type(attributes) is dict:
            yield from ((f".{name}", part) for name, part in list(attributes.items()))


def _walk(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each value that some modules reach, once."""
    seen, known = set(), set(names)
    for module in names:
        top = vars(sys.modules[module]) if isinstance(sys.modules.get(module), types.ModuleType) else {}
        todo = [(f"{module}.{name}", value, 0) for name, value in list(top.items()) if name not in _OF_A_MODULE]
        todo.reverse()
        while todo:
            path, value, depth = todo.pop()
            try:
                text = _text(value)
                if text is not None:
                    yield path, text
                elif depth < _DEPTH and id(value) not in seen:
                    seen.add(id(value))
                    parts = [part for _, part in zip(range(_WIDTH), _parts(value, known))]  # noqa: B905
                    todo += [(path + name, part, depth + 1) for name, part in reversed(parts)]
            except Exception as error:  # of an object that is not finished
                yield path, type(error).__name__


def main() -> None:
    folder = os.path.dirname(sys.argv[1])
    with open(os.path.join(folder, "wanted.json")) as file:
        wanted = json.load(file)
    result: dict[str, Any] = {"seconds": _CPU_SECONDS, "modules": sorted(sys.modules)}
    result["values"] = dict(_walk(wanted["modules"]))
    if wanted["paths"] is not None:
        result["values"] = {path: result["values"].get(path) for path in wanted["paths"]}
    rank = os.environ["RANK"]
    with open(f"{sys.argv[1]}.{rank}", "w") as file:
        json.dump(result, file)


main()
