# SPDX-License-Identifier: BSD-3-Clause
"""List the files of a workspace with their digests, and compute the hash of a run's code.

Paths are relative, with ``/``; bytes that are not UTF-8 are Python's surrogate escapes. As in git, the only part of a
mode that counts is whether the owner may execute the file, and times do not count.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchx_monarch.system import safe_files

FILE, EXECUTABLE, LINK, FOLDER = "f", "x", "l", "d"

MARKER = ".torchx-monarch-"
"""Prefix of the temporary files that clients create in a workspace; they do not belong to its tree."""

MAX_ENTRIES = 200_000
"""Largest number of files, links and empty folders in a workspace. A folder with more is unlikely to be code."""

MAX_TREE = 100 << 20
"""Largest JSON text of a tree in bytes, enough for 200,000 paths of 400 characters."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_PATH = re.compile(r"\0|(^|/)\.{0,2}(/|\Z)")


def is_home_or_root(folder: str) -> bool:
    """Whether a folder is the home folder or ``/``, by any of its names: these hold more than code, such as keys."""
    return any(os.path.exists(path) and os.path.samefile(folder, path) for path in ("/", os.path.expanduser("~")))


class Entry(NamedTuple):
    """A file, symbolic link or empty folder of a workspace.

    Attributes:
        kind: ``FILE``, ``EXECUTABLE``, ``LINK``, or ``FOLDER`` for a folder without other entries of the tree.
        content: SHA-256 of a file in hex; target of a link; empty for a folder.
        size: size of a file in bytes; 0 for a link or folder.
    """

    kind: str
    content: str
    size: int

    @property
    def is_file(self) -> bool:
        """Whether the entry is a file, whose content is sent separately."""
        return self.kind in (FILE, EXECUTABLE)

    @property
    def is_valid(self) -> bool:
        """Whether the values, which may come from anywhere, are those of a file, link or folder."""
        if not isinstance(self.content, str) or type(self.size) is not int:
            return False
        if self.is_file:
            return bool(_DIGEST.fullmatch(self.content)) and self.size >= 0
        if self.kind == LINK:
            return self.size == 0 and self.content != "" and "\0" not in self.content
        return (self.kind, self.content, self.size) == (FOLDER, "", 0)


@dataclasses.dataclass(frozen=True)
class Tree:
    """The files, links and empty folders of a workspace at one moment, by path."""

    entries: Mapping[str, Entry]

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 in hex over all paths, kinds, digests and link targets; equal for equal trees only."""
        # Paths, kinds and contents cannot hold a zero byte, so different trees give different texts.
        text = "\0".join(f"{path}\0{entry.kind}\0{entry.content}" for path, entry in sorted(self.entries.items()))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    @functools.cached_property
    def contents(self) -> dict[str, int]:
        """Sizes in bytes of the distinct file contents, by digest."""
        return {entry.content: entry.size for entry in self.entries.values() if entry.is_file}

    @functools.cached_property
    def parents(self) -> set[str]:
        """The folders with other entries of the tree."""
        found = {""}
        for path in self.entries:
            while (path := path.rpartition("/")[0]) not in found:
                found.add(path)
        return found - {""}

    @property
    def names_with_files(self) -> set[str]:
        """The names at the top of the workspace, without those of empty folders."""
        return {path.partition("/")[0] for path, entry in self.entries.items() if "/" in path or entry.kind != FOLDER}

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    @classmethod
    def decode(cls, entries: Any) -> Tree:
        """Return a tree from a JSON object of an untrusted source.

        Raises:
            ValueError: it is no tree, or some of it would lie outside the folder into which it is written.
        """
        try:
            tree = cls({path: Entry(*entry) for path, entry in entries.items()})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a tree: {error}") from None
        if len(tree.entries) > MAX_ENTRIES:
            raise ValueError(f"a tree has at most {MAX_ENTRIES} entries")
        for path, entry in tree.entries.items():
            if _NO_PATH.search(path):
                raise ValueError(f"{path!r} is no path below a workspace")
            if not entry.is_valid:
                raise ValueError(f"{path!r} is no file, link or folder of a tree: {entry}")
            if entry.is_file and tree.contents[entry.content] != entry.size:
                raise ValueError(f"{path!r} has another size than a file of the same content")
        if wrong := tree.parents & tree.entries.keys():
            raise ValueError(f"something lies below {min(wrong)!r}, which is no folder with something in it")
        return tree

    def write(self, folder: str, content: Callable[[str], bytes]) -> None:
        """Write the tree into a folder, which is created. The files are copies, which a run may change.

        Args:
            content: called with a digest; returns that content.
        """
        os.mkdir(folder, 0o700)
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for path in sorted(self.parents):
                os.mkdir(path, 0o700, dir_fd=root)
            for path, entry in self.entries.items():
                if entry.kind == FOLDER:
                    os.mkdir(path, 0o700, dir_fd=root)
                elif entry.kind == LINK:
                    os.symlink(entry.content, path, dir_fd=root)
                else:
                    mode = 0o700 if entry.kind == EXECUTABLE else 0o600
                    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=root)
                    try:
                        safe_files.write_all(target, content(entry.content))
                    finally:
                        os.close(target)
        finally:
            os.close(root)
