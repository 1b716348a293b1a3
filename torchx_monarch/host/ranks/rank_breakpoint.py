# SPDX-License-Identifier: BSD-3-Clause
"""In a rank: have ``pdb.set_trace``, which ``breakpoint()`` calls by default, wait for a debugger of the job's user.

``zygote_main`` and ``rank_main`` run this file: it imports the standard library alone. ``rank_debugger`` has what
happens in a breakpoint; it is run at the first one.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any


def watch(path: str, load: Callable[[str], dict[str, Any]], own_files: Collection[str]) -> None:
    """Replace ``pdb.set_trace``, now or when the program imports ``pdb``.

    ``sys.breakpointhook`` and ``PYTHONBREAKPOINT`` keep their meaning.

    Args:
        path: socket file of the host (see ``breakpoints``).
        load: runs a file of this folder and returns its global names.
        own_files: the files whose frames are below the program's on the stack.
    """
    own, debugger = os.getpid(), dict[str, Any]()

    def replace(module: ModuleType) -> None:
        found = getattr(module, "__file__", None) or ""
        if os.path.dirname(found) != os.path.dirname(os.__file__):
            return  # a pdb.py of the program's

        @functools.wraps(module.set_trace)
        def set_trace(*, header: str | None = None, **more: Any) -> None:
            if not debugger:
                debugger.update(load("rank_debugger.py"))
            # A process that the rank has forked has no debugger: its stdin is empty, as that of the rank.
            host = path if os.getpid() == own else ""
            debugger["stop_at"](sys._getframe(1), host, own_files, header, more)

        module.set_trace = set_trace  # type: ignore[attr-defined]

    if "pdb" in sys.modules:
        replace(sys.modules["pdb"])
    else:
        sys.meta_path.insert(0, _Finder(replace))


class _Finder:
    """Call a function with ``pdb`` when it is imported; find no module otherwise."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self._imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders find for ``pdb``."""
        if name != "pdb":
            return None
        sys.meta_path.remove(self)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((found for found in specs if found is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._imported(module)

            loader.exec_module = exec_module
        return spec
