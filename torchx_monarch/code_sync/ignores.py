# SPDX-License-Identifier: BSD-3-Clause
"""Decide which paths of a workspace are ignored, by the rules of ``.torchxignore`` (TorchX) and ``.gitignore`` (git).

The last matching line of the workspace's ``.torchxignore`` decides. A line that begins with ``!`` includes paths that
earlier lines or a ``.gitignore`` exclude. If no line matches, the ``.gitignore`` files decide: those of the workspace,
of its folders, and of its parent folders up to the root of the repository. Nothing below an ignored folder can be
included again. The names in ``ALWAYS`` are always ignored.

TorchX's patterns differ from git's: they match the whole path below the workspace, and ``*`` matches ``/`` as well
(``torchx.workspace.api.walk_workspace``; a test compares this module with it). ``pathspec`` implements git's patterns.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from torchx_monarch.code_sync.manifest import MARKER

TORCHX_IGNORE = ".torchxignore"
GIT_IGNORE = ".gitignore"

ALWAYS = frozenset({".git", ".hg", ".svn", "__pycache__"})
"""Version control data; and bytecode, which Python regenerates, and whose validity depends on the times of its sources
(which are not sent)."""


class TorchXIgnore:
    """Match paths against the patterns of a ``.torchxignore``."""

    def __init__(self, text: str) -> None:
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        self._patterns = [(line[0] == "!", _glob(line.removeprefix("!"))) for line in lines if line not in ("", ".")]

    def match(self, path: str, first: int) -> tuple[bool | None, int]:
        """Decide whether a path below the workspace is ignored.

        Returns:
            Whether the last matching pattern ignores the path, None if no pattern matches; and the value of ``first``
            for paths below this one. As in TorchX, patterns up to the last match of a folder do not apply to its
            content.
        """
        answer: bool | None = None
        last = first
        for number, (is_included, pattern) in enumerate(self._patterns[first:], first + 1):
            if pattern.match(path):
                answer, last = not is_included, number
        return answer, last


class _Git(NamedTuple):
    """One ``.gitignore`` file.

    Attributes:
        folder: its folder relative to the workspace, ending in ``/``; empty for the workspace and its parent folders.
        way: the workspace relative to the file's folder, ending in ``/``; empty for a file within the workspace.
        spec: its patterns.
    """

    folder: str
    way: str
    spec: GitIgnoreSpec


class IgnoreRules:
    """The ignore rules that apply to one folder."""

    def __init__(self, torchx: TorchXIgnore, first: int, git: Sequence[_Git]) -> None:
        self._torchx = torchx
        self._first = first
        self._git = git  # outermost folder first

    @classmethod
    def load(cls, root: str) -> IgnoreRules:
        """Return the rules of a workspace without the ``.gitignore`` files within it, which ``below`` adds."""
        around = _around(root)
        if _by_git(around, ""):
            around = []  # git ignores the workspace itself, but the user has named it: parent folders do not count
        return cls(TorchXIgnore(_text(os.path.join(root, TORCHX_IGNORE))), 0, around)

    def below(self, root: str, folder: str) -> IgnoreRules:
        """Return the rules of a folder of the workspace, empty for itself, that has a ``.gitignore``."""
        spec = _spec(_text(os.path.join(root, folder, GIT_IGNORE)))
        added = _Git(f"{folder}/" if folder else "", "", spec)
        return IgnoreRules(self._torchx, self._first, [*self._git, added])

    def leave_out(self, path: str, is_folder: bool) -> tuple[bool, IgnoreRules]:
        """Return whether a path of the folder is ignored, and the rules for paths below it."""
        name = path.rpartition("/")[2]
        if name in ALWAYS or name.startswith(MARKER):
            return True, self
        answer, first = self._torchx.match(path, self._first)
        if answer is None:
            answer = _by_git(self._git, f"{path}/" if is_folder else path)
        if first == self._first or not is_folder:
            return answer, self
        return answer, IgnoreRules(self._torchx, first, self._git)


def _by_git(git: Sequence[_Git], path: str) -> bool:
    """Whether git ignores a path, which ends in ``/`` for a folder. The innermost matching ``.gitignore`` decides."""
    for folder, way, spec in reversed(git):
        answer = spec.check_file(way + path[len(folder) :]).include
        if answer is not None:
            return answer
    return False


def _around(root: str) -> list[_Git]:
    """Read the ``.gitignore`` files of a workspace's parent folders up to the root of its git repository.

    The outermost is first. There are none outside a repository.
    """
    found: list[_Git] = []
    folder, way = root, ""
    while not os.path.exists(os.path.join(folder, ".git")):
        folder, name = os.path.split(folder)
        if not name:
            return []  # no repository
        way = f"{name}/{way}"
        if text := _text(os.path.join(folder, GIT_IGNORE)):
            found.insert(0, _Git("", way, _spec(text)))
    return found


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


def _spec(text: str) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines(text.splitlines())


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""
