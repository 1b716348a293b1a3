# SPDX-License-Identifier: BSD-3-Clause
"""Keep the modules that ``-cfg preload=auto`` has learned of a program, and store them over jobs.

Their names come from ranks, and from files that other processes may have written: what is not valid is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from torchx_monarch.system import safe_files

FOLDER = "MONARCH_LEARNED_DIR"
"""The variable that names the folder in which the hosts of batch jobs store what they have learned."""

MOST_MODULES = 5000
"""Largest number of modules that are learned of one program; `import transformers` with a model makes about 2000."""

MAX_BYTES = 1 << 20
"""Largest size of a report of a rank, and of a file."""

_LONGEST_NAME = 200

_MOST_FILES = 200
"""Programs of which the folder keeps the modules; the least recently written ones are removed."""


def is_module_name(name: object) -> bool:
    """Return whether a value can be the name of a module that may be imported ahead."""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isascii():
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
    def parse(cls, value: object) -> LearnedModules:
        """Return what a value of untrusted JSON holds; whatever is not valid is left out."""
        fields = value if isinstance(value, dict) else {}
        dropped = fields.get("dropped")
        found = cls()
        for name, why in list(dropped.items() if isinstance(dropped, dict) else ())[:MOST_MODULES]:
            if is_module_name(name) and isinstance(why, str):
                found.drop(name, why)
        found.learn(fields.get("modules"), fields.get("variables"))
        return found

    def learn(self, modules: object, variables: object = ()) -> bool:
        """Add modules and variables.

        Args:
            modules: a list of names; anything else in it is left out.
            variables: the same of environment variables.

        Returns:
            whether one is new.
        """
        before, room = (self.names, self.variables), MOST_MODULES - len(self.names)
        valid = [name for name in _listed(modules) if is_module_name(name) and not self._is_dropped(name)]
        self.names = (*self.names, *[name for name in dict.fromkeys(valid) if name not in self.names][:room])
        names = {name for name in _listed(variables) if isinstance(name, str) and len(name) <= _LONGEST_NAME}
        self.variables = tuple(sorted({*self.variables, *names})[:MOST_MODULES])
        return before != (self.names, self.variables)

    def drop(self, name: str, why: str) -> None:
        """Remove a module, and those inside it, for good.

        Args:
            name: the module.
            why: the reason, for people.
        """
        self.dropped[name] = why[:500]
        self.names = tuple(module for module in self.names if not self._is_dropped(module))

    def _is_dropped(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in self.dropped for length in range(1, len(parts) + 1))


@dataclasses.dataclass(frozen=True)
class LearnedFile:
    """The file of one program: JSON with what it is, ``modules``, ``dropped`` and ``variables``.

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
        """Return the file of a program, which need not exist.

        Args:
            folder: the folder of all files.
            app_id: id of an app: its name, a dash and random characters.
            role: name of the role.
            program: how the program is run, and its path, name or code.
        """
        app = app_id.rpartition("-")[0] or app_id
        key = hashlib.sha256("\0".join((app, role, program)).encode(errors="surrogateescape")).hexdigest()[:32]
        return cls(os.path.join(folder, f"{key}.json"), app, role, program)

    @classmethod
    def all_in(cls, folder: str) -> Iterator[LearnedFile]:
        """Yield the files of a folder, those that can be read."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)):
                path = os.path.join(folder, name)
                fields = _read(path)
                texts = [fields.get(field) for field in ("app", "role", "program")]
                if name.endswith(".json") and all(isinstance(text, str) for text in texts):
                    yield cls(path, *map(str, texts))

    def read(self) -> LearnedModules:
        """Return the modules; none if the file is missing, damaged, or not this user's."""
        return LearnedModules.parse(_read(self.path))

    def write(self, modules: LearnedModules) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written.
        """
        folder = os.path.dirname(self.path)
        os.makedirs(folder, 0o700, exist_ok=True)
        os.close(safe_files.open_folder(folder, below=folder))
        value: dict[str, Any] = {"app": self.app, "role": self.role, "program": self.program[:10_000]}
        value.update(modules=modules.names, dropped=modules.dropped, variables=modules.variables)
        data = json.dumps(value, indent=1).encode()
        safe_files.replace_file(self.path, data)
        _remove_oldest(folder)

    def remove(self) -> None:
        """Remove the file.

        Raises:
            OSError: it cannot be removed.
        """
        os.unlink(self.path)


def _listed(value: object) -> list[Any]:
    return value[: 2 * MOST_MODULES] if isinstance(value, list) else []


def _read(path: str) -> dict[str, Any]:
    try:
        value = safe_files.read_json(path, limit=MAX_BYTES, below=os.path.dirname(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _remove_oldest(folder: str) -> None:
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    ages = []
    for path in paths:
        with contextlib.suppress(OSError):  # another host has removed it
            ages.append((os.stat(path, follow_symlinks=False).st_mtime, path))
    for _, path in sorted(ages)[:-_MOST_FILES]:
        with contextlib.suppress(OSError):
            os.unlink(path)
