# SPDX-License-Identifier: BSD-3-Clause
"""Check out trees into the folder in which runs work.

The files are copies of the stored contents, not links to them, because a run may write to its files and must not change
the store. Before the next run, a checkout restores the files of the tree that runs have changed, and keeps the files
that they have added, such as results and checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Mapping

from torchx_monarch.code_sync.manifest import EXECUTABLE, FOLDER, LINK, Entry, Tree
from torchx_monarch.system import safe_files

BYTECODE = "__pycache__"

_PIECE = 1 << 20
"""Most bytes that are read at a time."""

_Mark = tuple[int, int, int, int]
"""Values that reveal a changed file: mode, size in bytes, ctime in nanoseconds, inode number. Unlike mtime, ctime
cannot be set by a program."""


class WorkFolder:
    """A folder with a checked-out tree, in which runs work."""

    def __init__(self, path: str) -> None:
        os.mkdir(path, 0o700)
        self.path = path
        self._holds: dict[str, tuple[Entry, _Mark]] = {}

    def checkout(self, tree: Tree, source: Callable[[str], str]) -> None:
        """Check out a tree. No run may use the folder meanwhile.

        After an error, the checkout can be repeated with this tree or another.

        Args:
            source: called with a digest; returns the path of the file with that content.
        """
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
            if mark is not None:  # None if a process has deleted the file already; the next checkout writes it again
                self._holds[path] = entry, mark

    def _remove(self, path: str) -> None:
        """Delete an entry of the previous tree, unless a run has replaced it with something of another kind."""
        entry, mark = self._holds.pop(path)
        where = os.path.join(self.path, path)
        if entry.kind != FOLDER and self._is_within(os.path.dirname(path)) and _mark(where, entry) is not None:
            os.unlink(where)
            _forget_bytecode(where)

    def _remove_empty(self, candidates: set[str], needed: set[str]) -> None:
        """Delete folders that hold nothing but bytecode and are not needed, and their parents if those become empty."""
        for path in sorted(candidates, key=len, reverse=True):
            while path and path not in needed and self._is_within(path):
                where = os.path.join(self.path, path)
                if set(os.listdir(where)) - {BYTECODE}:
                    break
                shutil.rmtree(where)
                path = os.path.dirname(path)

    def _is_within(self, path: str) -> bool:
        """Whether a path is a real folder within this one, and not a symbolic link that a run has created."""
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
        """Delete a file that is in the way of an entry; rename a folder, which may hold outputs of a run."""
        status = _status(where)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(where)
            _forget_bytecode(where)
        elif entry.kind != FOLDER:
            _set_aside(where)


def _folders(entries: Mapping[str, Entry]) -> set[str]:
    """Return the folders of a tree: the parents of all entries, and the empty folders."""
    found: set[str] = set()
    for path, entry in entries.items():
        above = path if entry.kind == FOLDER else os.path.dirname(path)
        while above and above not in found:
            found.add(above)
            above = os.path.dirname(above)
    return found


def _status(where: str) -> os.stat_result | None:
    """Return the status of a path without following a final symbolic link; None if the path does not exist."""
    try:
        return os.lstat(where)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _mark(where: str, entry: Entry) -> _Mark | None:
    """Return the mark of a path; None if there is nothing at the path, or it is not of the entry's kind."""
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
    # A program may have put a FIFO, a link or a shorter file there.
    with open(safe_files.open_file(source(entry.content)), "rb", buffering=0) as content:
        if os.fstat(content.fileno()).st_size != entry.size:
            raise OSError(errno.ESTALE, "a program has changed it", source(entry.content))
        target = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            left = entry.size
            while left and (data := content.read(min(left, _PIECE))):
                left -= len(data)
                safe_files.write_all(target, data)
        except OSError as error:
            error.filename = where
            raise
        finally:
            os.close(target)


def _set_aside(where: str) -> None:
    number = 1
    while os.path.lexists(aside := f"{where}.before-sync-{number}"):
        number += 1
    os.rename(where, aside)


def _forget_bytecode(source: str) -> None:
    """Delete the bytecode of a source file that was deleted.

    Python detects stale bytecode by the size of its source and the mtime in whole seconds, which is too coarse here: a
    checkout can replace a source file within the same second.
    """
    folder, name = os.path.split(source)
    stem, extension = os.path.splitext(name)
    if extension == ".py":
        with contextlib.suppress(OSError):
            for file_name in os.listdir(os.path.join(folder, BYTECODE)):
                if file_name.startswith(f"{stem}."):
                    os.unlink(os.path.join(folder, BYTECODE, file_name))
