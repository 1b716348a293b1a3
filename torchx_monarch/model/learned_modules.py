# SPDX-License-Identifier: BSD-3-Clause
"""The modules that ``-cfg preload=auto`` has learned of a program, and the files that keep them over jobs.

Their names come from ranks, and from files that other processes may have written: what is not valid is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping

from torchx_monarch.model.codec import decode
from torchx_monarch.system import safe_files

FOLDER = "MONARCH_LEARNED_DIR"
"""The variable that names the folder in which the hosts of batch jobs store what they have learned."""

MAX_MODULES = 5000
"""Largest number of modules that are learned of one program; `import transformers` with a model makes about 2000."""

_MAX_NAME = 200

_MAX_FILES = 200
"""Programs of which the folder keeps the modules; the least recently written ones are removed."""


@dataclasses.dataclass
class LearnedModules:
    """The installed modules that a program imports.

    Attributes:
        names: names of the modules, in the order in which the program imports them.
        dropped: modules that must not be imported ahead, and why; nor are the modules inside them.
        variables: environment variables that the program sets, in ascending order.
        app: name of the apps that run the program, without what distinguishes one from another.
        role: name of the role.
        program: how the program is run, and its path, name or code.
    """

    names: tuple[str, ...] = ()
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    variables: tuple[str, ...] = ()
    app: str = ""
    role: str = ""
    program: str = ""

    @classmethod
    def read(cls, path: str) -> LearnedModules:
        """Read a file, or the report of a rank; return none if it is missing, damaged, or not this user's."""
        try:
            found = decode(cls, safe_files.read_json(path))
        except (OSError, ValueError):
            return cls()
        modules = cls(app=found.app, role=found.role, program=found.program)
        modules.learn(found.names, found.variables, found.dropped)
        return modules

    def learn(
        self, names: Iterable[str] = (), variables: Iterable[str] = (), dropped: Mapping[str, str] | None = None
    ) -> bool:
        """Add what a rank, or another job, has learned; return whether a module or a variable is new."""
        before = (self.names, self.variables)
        self.dropped.update({name: why[:500] for name, why in (dropped or {}).items() if _is_module_name(name)})
        valid = [name for name in (*self.names, *names) if _is_module_name(name) and not self._is_dropped(name)]
        self.names = tuple(dict.fromkeys(valid))[:MAX_MODULES]
        named = {name for name in variables if len(name) <= _MAX_NAME}
        self.variables = tuple(sorted({*self.variables, *named})[:MAX_MODULES])
        return before != (self.names, self.variables)

    def write(self, path: str) -> None:
        """Replace a file, and remove the oldest ones of its folder.

        Raises:
            OSError: it cannot be written.
        """
        folder = os.path.dirname(path)
        os.makedirs(folder, 0o700, exist_ok=True)
        safe_files.replace_file(path, json.dumps(vars(self), indent=1).encode())
        with contextlib.suppress(OSError):  # another host has removed one meanwhile
            for old in sorted(files_in(folder), key=lambda path: os.lstat(path).st_mtime)[:-_MAX_FILES]:
                os.unlink(old)

    def _is_dropped(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{dropped}.") for dropped in self.dropped)


def file_of(folder: str, app_id: str, role: str, program: str) -> tuple[str, LearnedModules]:
    """Return the path of a program's file, and what it has; an app's id is its name, a dash and random characters."""
    app = app_id.rpartition("-")[0] or app_id
    key = hashlib.sha256("\0".join((app, role, program)).encode(errors="surrogateescape")).hexdigest()[:32]
    path = os.path.join(folder, f"{key}.json")
    return path, dataclasses.replace(LearnedModules.read(path), app=app, role=role, program=program[:10_000])


def files_in(folder: str) -> list[str]:
    """Return the paths of all programs' files."""
    with contextlib.suppress(OSError):
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".json")]
    return []


def _is_module_name(name: str) -> bool:
    parts = name.split(".")
    is_program = "__main__" in parts  # importing that runs it
    return len(name) <= _MAX_NAME and name.isascii() and not is_program and all(map(str.isidentifier, parts))
