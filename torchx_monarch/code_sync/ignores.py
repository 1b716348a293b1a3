# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What of a workspace is left out: what ``.torchxignore`` says as TorchX reads it, and ``.gitignore`` as git does.

A path is left out if ``.torchxignore`` of the workspace names it. A line of it that begins with ``!`` takes back
earlier ones, and what ``.gitignore`` says. Else the ``.gitignore`` files decide: of the workspace, of its folders, and
of the folders around it up to the one with ``.git``. Nothing below a folder that is left out can be taken back. Beside
these, what no host has a use for is left out (``ALWAYS``).

TorchX's patterns are not git's: they are matched against the whole path below the workspace, where ``*`` also stands
for ``/`` (``torchx.workspace.api.walk_workspace``, which a test compares with this). git's are pathspec's affair.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from torchx_monarch.code_sync.manifest import MARKER

TORCHX_IGNORE = ".torchxignore"
GIT_IGNORE = ".gitignore"

ALWAYS = frozenset({".git", ".hg", ".svn", "__pycache__"})
"""Histories, and bytecode, which Python makes again and takes for stale by the times of its sources."""

_NEVER_BY_TORCHX = "Dockerfile.torchx"
"""TorchX builds images from this file at the top of a workspace, and never leaves it out. A folder of this name has no
such right: ``walk_workspace`` asks for it as ``./Dockerfile.torchx``, which its ``_ignore`` does not exempt."""


class TorchXIgnore:
    """The patterns of a ``.torchxignore``.

    Args:
        text: of the file.
    """

    def __init__(self, text: str) -> None:
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        self._patterns = [
            (_glob(line[1:]) if line[0] == "!" else None, _glob(line)) for line in lines if line not in ("", ".")
        ]

    def verdict(self, path: str, is_folder: bool, first: int = 0) -> tuple[bool | None, int]:
        """Whether a path is left out, by the pattern that matches last; None when none does.

        Args:
            path: below the workspace.
            is_folder: whether it is one.
            first: the pattern to begin with.

        Returns:
            the answer, and the pattern from which on paths below this one are matched: as in TorchX, those up to the
            last that matched a folder do not count for what is in it.
        """
        answer: bool | None = None
        last = first
        if path == _NEVER_BY_TORCHX and not is_folder:
            return answer, last
        for number in range(first, len(self._patterns)):
            taken_back, pattern = self._patterns[number]
            if taken_back and taken_back.match(path):
                answer, last = False, number + 1
            elif pattern.match(path):  # as in TorchX, also with the ! where that is part of a name
                answer, last = True, number + 1
        return answer, last


class _Git(NamedTuple):
    """One ``.gitignore``.

    Attributes:
        folder: where it lies, below the workspace and with ``/``; empty for the workspace itself and what is around it.
        way: from where it lies to the workspace, with ``/``; empty for one within.
        spec: its patterns.
    """

    folder: str
    way: str
    spec: GitIgnoreSpec


class Rules:
    """What counts in one folder.

    Attributes:
        digest: of everything that it follows from; two with the same digest leave out the same.
    """

    def __init__(self, torchx: TorchXIgnore, first: int, git: Sequence[_Git], digest: str) -> None:
        self._torchx = torchx
        self._first = first
        self._git = tuple(git)  # the innermost last
        self.digest = digest

    @classmethod
    def of(cls, root: str) -> Rules:
        """Those of a workspace, but for ``.gitignore`` files within, which ``below`` adds.

        Raises:
            OSError: a file of patterns cannot be read.
        """
        torchx = _text(os.path.join(root, TORCHX_IGNORE))
        around = _around(root)
        if _by_git(around[0], ""):
            around = [], ""  # it was asked for by name
        return cls(TorchXIgnore(torchx), 0, around[0], _digest(torchx, around[1]))

    def below(self, root: str, folder: str) -> Rules:
        """Those of a folder that has a ``.gitignore``.

        Args:
            root: the workspace.
            folder: path below it; empty for itself.

        Raises:
            OSError: that cannot be read.
        """
        text = _text(os.path.join(root, folder, GIT_IGNORE))
        added = _Git(f"{folder}/" if folder else "", "", _spec(text))
        return Rules(self._torchx, self._first, [*self._git, added], _digest(self.digest, text))

    def leave_out(self, path: str, is_folder: bool) -> tuple[bool, Rules]:
        """Whether a path of the folder is left out, and what counts below it."""
        name = path.rpartition("/")[2]
        if name in ALWAYS or name.startswith(MARKER):
            return True, self
        answer, first = self._torchx.verdict(path, is_folder, self._first)
        if answer is None:
            answer = _by_git(self._git, f"{path}/" if is_folder else path)
        if first == self._first or not is_folder:
            return answer, self
        return answer, Rules(self._torchx, first, self._git, _digest(self.digest, str(first)))


def _by_git(git: Sequence[_Git], path: str) -> bool:
    """Whether git leaves out a path, which ends in ``/`` for a folder: the innermost file that names it decides."""
    for folder, way, spec in reversed(git):
        answer = spec.check_file(way + path[len(folder) :]).include
        if answer is not None:
            return answer
    return False


def _around(root: str) -> tuple[list[_Git], str]:
    """The ``.gitignore`` files of the folders around a workspace within its repository, and what stands in them."""
    found: list[_Git] = []
    texts: list[str] = []
    folder, way = root, ""
    while not os.path.exists(os.path.join(folder, ".git")):
        folder, name = os.path.split(folder)
        if not name:
            return [], ""  # no repository
        way = f"{name}/{way}"
        if text := _text(os.path.join(folder, GIT_IGNORE)):
            found.insert(0, _Git("", way, _spec(text)))
            texts += [way, text]
    return found, "\0".join(texts)


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


def _spec(text: str) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines(text.splitlines())


def _text(path: str) -> str:
    """What stands in a file of patterns; nothing where there is none."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
