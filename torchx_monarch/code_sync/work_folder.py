# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A host's copy of a workspace: a folder that runs work in, brought from one tree to the next while none does.

Its files are copies of the kept contents and no links to them: a run may write into its folder, and what is kept must
not change by that. (Where the disk can, a copy shares its blocks.) What runs have changed in the tree's own files is
put right before the next run; what they have added, results and checkpoints, stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Mapping

from torchx_monarch.code_sync.manifest import EXECUTABLE, FOLDER, LINK, Entry, Tree

BYTECODE = "__pycache__"

_SMALL = 1 << 20
"""Bytes of a file that is copied by reading and writing it, which is two calls less."""

_Mark = tuple[int, int, int, int]
"""By which a changed file shows: mode, size, time of change of the inode in ns, its number. The second time nobody can
set."""


class WorkFolder:
    """One copy.

    Attributes:
        path: where it lies now.
        users: how many runs work in it.
        tree: hash of what it holds; empty when it had to be left half-way.

    Args:
        path: a folder to make.
    """

    def __init__(self, path: str) -> None:
        os.mkdir(path, 0o700)
        self.path = path
        self.users = 0
        self.tree = ""
        self._holds: dict[str, tuple[Entry, _Mark]] = {}

    def checkout(self, tree: Tree, source: Callable[[str], str]) -> None:
        """Make it hold a tree; nobody may work in it meanwhile.

        It can be tried again after an error, for this tree or another.

        Args:
            tree: what it is to hold.
            source: the file with the content of a digest.

        Raises:
            OSError: it cannot be written.
        """
        self.tree = ""
        gone = [path for path, (entry, _) in self._holds.items() if tree.entries.get(path) != entry]
        made: set[str] = set()
        for path in gone:
            self._remove(path)
        self._remove_empty({os.path.dirname(path) for path in gone} | set(gone), _folders(tree.entries))
        for path, entry in tree.entries.items():
            held, where = self._holds.get(path), f"{self.path}/{path}"
            if held is not None and _mark(where, entry) == held[1]:
                continue
            self._holds.pop(path, None)
            self._make_folder(os.path.dirname(path), made)
            self._clear(where, entry)
            _make(where, entry, source)
            mark = _mark(where, entry)
            if mark is not None:  # else it is gone again, and will be made the next time
                self._holds[path] = entry, mark
        self.tree = tree.hash

    def has_outputs(self) -> bool:
        """Whether there is something in it that is not of the tree, but for bytecode: results of a run."""
        own = _folders({path: entry for path, (entry, _) in self._holds.items()})
        for folder, inside, files in os.walk(self.path):
            inside[:] = [name for name in inside if name != BYTECODE]
            below = os.path.relpath(folder, self.path) + "/" if folder != self.path else ""
            if any(below + name not in self._holds for name in files):
                return True
            if any(below + name not in own for name in inside):
                return True
        return False

    def _remove(self, path: str) -> None:
        """Take away what is no longer of the tree, unless a run has put something else in its place."""
        entry, mark = self._holds.pop(path)
        where = os.path.join(self.path, path)
        if entry.kind != FOLDER and self._is_within(os.path.dirname(path)) and _mark(where, entry) is not None:
            os.unlink(where)
            _forget_bytecode(where)

    def _remove_empty(self, candidates: set[str], needed: set[str]) -> None:
        """Take away folders in which nothing is left that is worth anything."""
        for path in sorted(candidates, key=len, reverse=True):
            while path and path not in needed and self._is_within(path):
                where = os.path.join(self.path, path)
                if set(os.listdir(where)) - {BYTECODE}:
                    break
                shutil.rmtree(where)
                path = os.path.dirname(path)

    def _is_within(self, path: str) -> bool:
        """Whether this is a folder of ours, and no link to another that a run has put there."""
        where = self.path
        for name in path.split("/") if path else ():
            where = os.path.join(where, name)
            status = _status(where)
            if status is None or not stat.S_ISDIR(status.st_mode):
                return False
        return True

    def _make_folder(self, path: str, made: set[str]) -> None:
        if not path or path in made:
            return
        self._make_folder(os.path.dirname(path), made)
        where = os.path.join(self.path, path)
        try:
            os.mkdir(where, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(where).st_mode):
                _set_aside(where)
                os.mkdir(where, 0o700)
        made.add(path)

    def _clear(self, where: str, entry: Entry) -> None:
        """Make room, for the tree comes first; a folder of a run, with all that is in it, only moves aside."""
        status = _status(where)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(where)
            _forget_bytecode(where)
        elif entry.kind != FOLDER:
            _set_aside(where)


def _folders(entries: Mapping[str, Entry]) -> set[str]:
    """The folders that are needed for something, and those that are there for themselves."""
    found: set[str] = set()
    for path, entry in entries.items():
        above = path if entry.kind == FOLDER else os.path.dirname(path)
        while above and above not in found:
            found.add(above)
            above = os.path.dirname(above)
    return found


def _status(where: str) -> os.stat_result | None:
    """Of what lies there, no link followed at the end; None for nothing, or nothing that can be reached."""
    try:
        return os.lstat(where)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _mark(where: str, entry: Entry) -> _Mark | None:
    """That of what lies there, if it is of the entry's kind."""
    status = _status(where)
    if status is None:
        return None
    kind = stat.S_IFMT(status.st_mode)
    if entry.kind == FOLDER:
        return (0, 0, 0, 0) if kind == stat.S_IFDIR else None
    if kind != (stat.S_IFLNK if entry.kind == LINK else stat.S_IFREG):
        return None
    return status.st_mode, status.st_size, status.st_ctime_ns, status.st_ino


def _make(where: str, entry: Entry, source: Callable[[str], str]) -> None:
    if entry.kind == FOLDER:
        with contextlib.suppress(FileExistsError):
            os.mkdir(where, 0o700)
        return
    if entry.kind == LINK:
        os.symlink(entry.content, where)
        return
    mode = 0o700 if entry.kind == EXECUTABLE else 0o600
    with open(source(entry.content), "rb", buffering=0) as content:
        target = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            _copy(content.fileno(), target, entry.size)
        except OSError as error:
            error.filename = where
            raise
        finally:
            os.close(target)


def _copy(source: int, target: int, size: int) -> None:
    if size <= _SMALL:
        data = memoryview(os.read(source, size))
        while data:
            data = data[os.write(target, data) :]
        return
    left = size
    with contextlib.suppress(AttributeError, OSError):  # not everywhere; what it did not copy is copied below
        while left and (copied := os.copy_file_range(source, target, left)):
            left -= copied
    while left and (read := os.read(source, min(left, _SMALL))):
        left -= len(read)
        data = memoryview(read)
        while data:
            data = data[os.write(target, data) :]


def _set_aside(where: str) -> None:
    number = 1
    while os.path.lexists(aside := f"{where}.before-sync-{number}"):
        number += 1
    os.rename(where, aside)


def _forget_bytecode(source: str) -> None:
    """Python knows stale bytecode by the size of its source and the time to the second: too coarse for us."""
    folder, name = os.path.split(source)
    stem, extension = os.path.splitext(name)
    if extension == ".py":
        with contextlib.suppress(OSError):
            for each in os.listdir(os.path.join(folder, BYTECODE)):
                if each.startswith(f"{stem}."):
                    os.unlink(os.path.join(folder, BYTECODE, each))
