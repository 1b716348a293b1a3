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
from collections.abc import Iterable, Iterator

from torchx_monarch.model.codec import decode
from torchx_monarch.system import safe_files

FOLDER = "MONARCH_LEARNED_DIR"
"""The variable that names the folder in which the hosts of batch jobs store what they have learned."""

MAX_MODULES = 5000
"""Largest number of modules that are learned of one program; `import transformers` with a model makes about 2000."""

MAX_BYTES = 1 << 20
"""Largest size of a report of a rank, and of a file."""

_MAX_NAME = 200

_MAX_FILES = 200
"""Programs of which the folder keeps the modules; the least recently written ones are removed."""


def is_module_name(name: str) -> bool:
    """Return whether a name can be that of a module that may be imported ahead."""
    if len(name) > _MAX_NAME or not name.isascii():
        return False
    parts = name.split(".")
    return all(part.isidentifier() for part in parts) and "__main__" not in parts  # importing that runs a program


@dataclasses.dataclass
class LearnedModules:
    """The installed modules that a program imports.

    Attributes:
        names: names of the modules, in the order in which the program imports them.
        dropped: modules that must not be imported ahead, and why; nor are the modules inside them.
        variables: environment variables that the program sets, in ascending order.
    """

    names: tuple[str, ...] = ()
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    variables: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str) -> LearnedModules:
        """Read a file, or the report of a rank; return none if it is missing, damaged, or not this user's."""
        try:
            found = decode(cls, safe_files.read_json(path, limit=MAX_BYTES))
        except (OSError, ValueError):
            return cls()
        modules = cls(dropped={name: why[:500] for name, why in found.dropped.items() if is_module_name(name)})
        modules.learn(found.names, found.variables)
        return modules

    def learn(self, modules: Iterable[str], variables: Iterable[str] = ()) -> bool:
        """Add modules and environment variables; return whether one is new."""
        before = (self.names, self.variables)
        valid = [name for name in modules if is_module_name(name) and not self._is_dropped(name)]
        self.names = tuple(dict.fromkeys((*self.names, *valid)))[:MAX_MODULES]
        named = {name for name in variables if len(name) <= _MAX_NAME}
        self.variables = tuple(sorted({*self.variables, *named})[:MAX_MODULES])
        return before != (self.names, self.variables)

    def drop(self, name: str, why: str) -> None:
        """Remove a module, and those inside it, for good."""
        self.dropped[name] = why[:500]
        self.names = tuple(module for module in self.names if not self._is_dropped(module))

    def _is_dropped(self, name: str) -> bool:
        return any(name == dropped or name.startswith(f"{dropped}.") for dropped in self.dropped)


@dataclasses.dataclass(frozen=True)
class LearnedFile:
    """The file of one program: JSON with what it is, and ``LearnedModules``.

    Attributes:
        path: the file.
        app: name of the apps that run the program, without what distinguishes one from another.
        role: name of the role.
        program: how the program is run, and its path, name or code.
    """

    path: str
    app: str
    role: str
    program: str

    @classmethod
    def of(cls, folder: str, app_id: str, role: str, program: str) -> LearnedFile:
        """Return the file of a program, which need not exist; an id is the name, a dash and random characters."""
        app = app_id.rpartition("-")[0] or app_id
        key = hashlib.sha256("\0".join((app, role, program)).encode(errors="surrogateescape")).hexdigest()[:32]
        return cls(os.path.join(folder, f"{key}.json"), app, role, program)

    @classmethod
    def all_in(cls, folder: str) -> Iterator[LearnedFile]:
        """Yield the files of a folder, those that can be read."""
        for path in _files_in(folder):
            with contextlib.suppress(OSError, ValueError, TypeError):
                yield decode(cls, {**safe_files.read_json(path, limit=MAX_BYTES), "path": path})

    def read(self) -> LearnedModules:
        """Return the modules; none if the file cannot be read."""
        return LearnedModules.read(self.path)

    def write(self, modules: LearnedModules) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written.
        """
        folder = os.path.dirname(self.path)
        os.makedirs(folder, 0o700, exist_ok=True)
        program = {"app": self.app, "role": self.role, "program": self.program[:10_000]}
        safe_files.replace_file(self.path, json.dumps({**program, **vars(modules)}, indent=1).encode())
        for path in sorted(_files_in(folder), key=_written_at)[:-_MAX_FILES]:
            with contextlib.suppress(OSError):  # another host has removed it
                os.unlink(path)


def _files_in(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".json")]
    return []


def _written_at(path: str) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path, follow_symlinks=False).st_mtime
    return 0.0
