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
    """The ignore rules that apply to one folder.

    Args:
        patterns: those of the ``.torchxignore``, and whether each includes what matches.
        git: the outermost folder first.
    """

    def __init__(self, patterns: Sequence[tuple[bool, re.Pattern[str]]], git: Sequence[_Git]) -> None:
        self._patterns = patterns
        self._git = git

    @classmethod
    def load(cls, root: str) -> IgnoreRules:
        """Return the rules of a workspace without the ``.gitignore`` files within it, which ``below`` adds."""
        around = _around(root)
        if _by_git(around, ""):
            around = []  # git ignores the workspace itself, but the user has named it: parent folders do not count
        text = _text(os.path.join(root, TORCHX_IGNORE))
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        patterns = [
            (line[0] == "!", re.compile(fnmatch.translate(line.removeprefix("!"))))
            for line in lines
            if line not in ("", ".")
        ]
        return cls(patterns, around)

    def below(self, root: str, folder: str) -> IgnoreRules:
        """Return the rules of a folder of the workspace, empty for itself, that has a ``.gitignore``."""
        spec = _spec(os.path.join(root, folder, GIT_IGNORE))
        return IgnoreRules(self._patterns, [*self._git, _Git(f"{folder}/" if folder else "", "", spec)])

    def leave_out(self, path: str, is_folder: bool) -> tuple[bool, IgnoreRules]:
        """Return whether a path of the folder is ignored, and the rules for paths below it.

        As in TorchX, patterns up to the last match of a folder do not apply to its content.
        """
        name = path.rpartition("/")[2]
        if name in ALWAYS or name.startswith(MARKER):
            return True, self
        answer, rest = None, self._patterns
        for number, (is_included, pattern) in enumerate(self._patterns, 1):
            if pattern.match(path):
                answer, rest = not is_included, self._patterns[number:]
        if answer is None:
            answer = _by_git(self._git, f"{path}/" if is_folder else path)
        return answer, IgnoreRules(rest, self._git) if is_folder else self


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
        found.insert(0, _Git("", way, _spec(os.path.join(folder, GIT_IGNORE))))
    return found


def _spec(path: str) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines(_text(path).splitlines())


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""
