# SPDX-License-Identifier: BSD-3-Clause
"""The installed modules that a program imports, for the zygote of its next start, and the files that keep them.

They come from ranks, and from files that other processes may have written: what is not valid is left out.
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
"""Largest number of modules that are learned of one program."""

_MAX_NAME = 200

_MAX_REPORT = 1 << 23
"""Bytes of a report."""

_MAX_FILES = 200
"""Programs of which the folder keeps the modules; the least recently written ones are removed."""


@dataclasses.dataclass(frozen=True)
class LearnedImport:
    """The import of a module by a program.

    Attributes:
        name: the module.
        environ: variables that the program has changed before, None for one that it has removed.
        filters: the warning filters, if it has changed them, as ``host.ranks.learned_imports`` formats them.
        begins_again: whether the program had neither written nor opened anything.
        differs: in a rank for which it was imported ahead, how the program's state was another; else empty.
    """

    name: str
    environ: dict[str, str | None] = dataclasses.field(default_factory=dict)
    filters: str = ""
    begins_again: bool = False
    differs: str = ""

    @property
    def is_valid(self) -> bool:
        parts = self.name.split(".")
        is_program = "__main__" in parts  # importing that runs it
        return (
            len(self.name) <= _MAX_NAME and self.name.isascii() and not is_program and all(map(str.isidentifier, parts))
        )


@dataclasses.dataclass
class LearnedModules:
    """The installed modules that a program imports.

    Attributes:
        imports: the imports of the modules, in their order.
        dropped: modules that must not be imported ahead, and why; nor are the modules inside them.
        app: name of the apps that run the program, without what distinguishes one from another.
        role: name of the role.
        program: how the program is run, and its path, name or code.
    """

    imports: tuple[LearnedImport, ...] = ()
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    app: str = ""
    role: str = ""
    program: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the modules."""
        return [learned.name for learned in self.imports]

    @classmethod
    def read(cls, path: str) -> LearnedModules:
        """Read a file; return none if it is missing, damaged, or not this user's."""
        try:
            found = decode(cls, safe_files.read_json(path, limit=_MAX_REPORT))
        except (OSError, ValueError):
            return cls()
        modules = cls(app=found.app, role=found.role, program=found.program)
        modules.learn(found.imports, found.dropped)
        return modules

    def learn(self, imports: Iterable[LearnedImport] = (), dropped: Mapping[str, str] | None = None) -> bool:
        """Add what a rank, or another job, has learned; return whether anything is new."""
        before = self.imports
        new = {name: why[:500] for name, why in (dropped or {}).items() if LearnedImport(name).is_valid}
        self.dropped.update(new)
        latest = {learned.name: learned for learned in (*before, *imports) if learned.is_valid and not learned.differs}
        self.imports = tuple(found for name, found in latest.items() if not self._is_dropped(name))[:MAX_MODULES]
        return before != self.imports

    def write(self, path: str) -> None:
        """Replace a file, and remove the oldest ones of its folder.

        Raises:
            OSError: it cannot be written.
        """
        folder = os.path.dirname(path)
        os.makedirs(folder, 0o700, exist_ok=True)
        safe_files.replace_file(path, json.dumps(dataclasses.asdict(self), indent=1).encode())
        with contextlib.suppress(OSError):  # another host has removed one meanwhile
            for old in sorted(files_in(folder), key=lambda path: os.lstat(path).st_mtime)[:-_MAX_FILES]:
                os.unlink(old)

    def _is_dropped(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{dropped}.") for dropped in self.dropped)


def read_report(path: str) -> list[LearnedImport]:
    """Read and remove the report of a rank, a JSON line for each import; return none without one."""
    found = list[LearnedImport]()
    try:
        lines = safe_files.read_file(path, limit=_MAX_REPORT).splitlines()
    except OSError:
        lines = []
    with contextlib.suppress(OSError):
        os.unlink(path)
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(decode(LearnedImport, safe_files.parse_json(line)))
    return found


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
