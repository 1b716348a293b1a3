# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tree of a workspace as it lies on this machine's disk, without reading again what has not changed.

What is known of a file's content is kept with its size, times and inode, as in git's index. As there, times may be too
coarse to show that a file has changed right after it was read: nothing is kept of one that was touched less than
``_SETTLED_AFTER`` before. (git: Documentation/technical/racy-git.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
import time
from typing import Any

from torchx_monarch.code_sync.ignores import GIT_IGNORE, Rules
from torchx_monarch.code_sync.manifest import EXECUTABLE, FILE, FOLDER, LINK, MAX_ENTRIES, Entry, Tree

_VERSION = 1

_SETTLED_AFTER = 2.0
"""Seconds. The coarsest times, of FAT, are even numbers of seconds; those of local disks are a tick of the kernel."""

_READ = 1 << 20

_PASSES = 5
"""How often a workspace is looked at again because something has changed meanwhile."""

_TRIES = 20
"""How often a file is read again that changes while it is read."""

_PAUSE = 0.02


class ScanError(Exception):
    """A workspace cannot be brought to hosts as it is; the message says what to do about it."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is still taken for code.

    Attributes:
        file: bytes of one file.
        total: bytes of all files.
        entries: files, links and empty folders.
    """

    file: int = 100 << 20
    total: int = 1 << 30
    entries: int = MAX_ENTRIES


Known = tuple[int, int, int, int, str]
"""Of a file: size, when its content and when its inode changed in ns, number of the inode, digest."""


@dataclasses.dataclass
class StatCache:
    """What earlier looks at a workspace have found.

    Attributes:
        files: contents that are known.
        rules: the digest of the rules of each folder, by its path.
        left_out: what was left out by them.
    """

    files: dict[str, Known] = dataclasses.field(default_factory=dict)
    rules: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def load(cls, path: str, root: str) -> StatCache:
        """That of a workspace; an empty one where there is none that can be used."""
        try:
            with open(path, encoding="utf-8") as file:
                values: Any = json.load(file)
            if values["version"] == _VERSION and values["root"] == root:
                return cls({p: tuple(v) for p, v in values["files"].items()}, values["rules"], set(values["left_out"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return cls()

    def save(self, path: str, root: str) -> None:
        """Keep it. What cannot be written is found again next time."""
        values = {
            "version": _VERSION,
            "root": root,
            "files": self.files,
            "rules": self.rules,
            "left_out": sorted(self.left_out),
        }
        aside = f"{path}.{os.getpid()}.tmp"
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(aside, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                json.dump(values, file, separators=(",", ":"))
            os.rename(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(aside)


def scan(root: str, memory: StatCache, limits: Limits = Limits()) -> Tree:
    """What a workspace consists of, as it was at one moment.

    Looks again until nothing has changed in between: who saves several files, or checks out another branch, does so
    within a moment. What changes all the time counts as it was last read.

    Args:
        root: the workspace, an absolute path.
        memory: of earlier looks; becomes that of this one. The same object is left as it is when nothing has changed.
        limits: of what is taken.

    Raises:
        ScanError: it is no folder, or something in it cannot be read, or is over the limits.
    """
    if not os.path.isdir(root):
        raise ScanError(f"the workspace {root} is no folder")
    before: Tree | None = None
    for _ in range(_PASSES):
        one = _Pass(root, memory, limits)
        try:
            tree = one.run()
        except OSError as error:
            raise ScanError(
                f"cannot read {error.filename} of the workspace: {error.strerror}; what is not for the hosts can be "
                "named in .torchxignore or .gitignore"
            ) from None
        memory.files, memory.rules, memory.left_out = one.files, one.rules, one.left_out
        if not one.read or tree == before:
            break
        before = tree
    return tree


class _Pass:
    """One look at all of it.

    Attributes:
        read: how many files had to be read, or were gone when they were to be.
        files, rules, left_out: as in ``StatCache``.
    """

    def __init__(self, root: str, memory: StatCache, limits: Limits) -> None:
        self.read = 0
        self.files: dict[str, Known] = {}
        self.rules: dict[str, str] = {}
        self.left_out: set[str] = set()
        self._root = root
        self._memory = memory
        self._limits = limits
        self._settled = time.time_ns() - int(_SETTLED_AFTER * 1e9)
        self._entries: dict[str, Entry] = {}
        self._found: list[tuple[str, str]] = []
        self._size = 0

    def run(self) -> Tree:
        """All of it; what is over the limits shows before anything is read."""
        folders = [("", Rules.of(self._root))]
        while folders:
            folder, rules = folders.pop()
            try:
                with os.scandir(os.path.join(self._root, folder)) as found:
                    inside = list(found)
            except FileNotFoundError:
                self.read += 1
                continue
            if any(each.name == GIT_IGNORE for each in inside):
                rules = rules.below(self._root, folder)
            self.rules[folder] = rules.digest
            # Patterns are matched only where they, or the path, are new.
            known = self._memory.rules.get(folder) == rules.digest
            empty = True
            for each in inside:
                path = f"{folder}/{each.name}" if folder else each.name
                if known and path in self._memory.files and self._is_as_it_was(path, each):
                    empty = False
                    continue
                below = rules
                is_folder = each.is_dir(follow_symlinks=False)
                name = f"{path}/" if is_folder else path
                left_out = known and name in self._memory.left_out
                if not left_out and (is_folder or not known or path not in self._memory.files):
                    left_out, below = rules.leave_out(path, is_folder)
                if left_out:
                    self.left_out.add(name)
                    continue
                empty = False
                if is_folder:
                    folders.append((path, below))
                else:
                    self._note(path, each)
            if empty and folder:
                self._entries[folder] = Entry(FOLDER, "", 0)
            if len(self._entries) + len(self._found) > self._limits.entries:
                raise ScanError(
                    f"the workspace {self._root} has more than {self._limits.entries} files: name a smaller folder as "
                    "the workspace, or what is not code in .torchxignore or .gitignore"
                )
        if self._size > self._limits.total:
            raise ScanError(
                f"the files of the workspace {self._root} have {_in_words(self._size)}, and code at most "
                f"{_in_words(self._limits.total)}: name what is not code in .torchxignore or .gitignore"
            )
        for path, where in self._found:
            self._read(path, where)
        return Tree(self._entries)

    def _is_as_it_was(self, path: str, found: os.DirEntry[str]) -> bool:
        """Take a file whose content is known; most of them are."""
        try:
            status = found.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        before = self._memory.files[path]
        if before[:4] != _key(status):
            return False
        self.files[path] = before
        self._size += before[0]
        kind = EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE
        self._entries[path] = Entry(kind, before[4], before[0])
        return True

    def _note(self, path: str, found: os.DirEntry[str]) -> None:
        try:
            if found.is_symlink():
                self._entries[path] = Entry(LINK, os.readlink(found.path), 0)
                return
            status = found.stat(follow_symlinks=False)
        except FileNotFoundError:
            self.read += 1
            return
        if stat.S_ISREG(status.st_mode):  # a socket or a pipe is a process's, and of this machine
            self._limit(path, status.st_size)
            self._found.append((path, found.path))
            self._size += status.st_size

    def _read(self, path: str, where: str) -> None:
        self.read += 1
        try:
            status, size, digest = _hash(where)
        except FileNotFoundError:
            return
        self._limit(path, size)
        if max(status.st_mtime_ns, status.st_ctime_ns) < self._settled:
            self.files[path] = (*_key(status), digest)
        kind = EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE
        self._entries[path] = Entry(kind, digest, size)

    def _limit(self, path: str, size: int) -> None:
        if size > self._limits.file:
            raise ScanError(
                f"{os.path.join(self._root, path)} has {_in_words(size)}, and a file of code at most "
                f"{_in_words(self._limits.file)}: name it in .torchxignore or .gitignore"
            )


def _key(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _hash(path: str) -> tuple[os.stat_result, int, str]:
    """The status of a file, its size and its digest, as it was at one moment.

    Of one that changes all the time the three need not agree; a log that grows counts with what was read of it.
    """
    for _ in range(_TRIES):
        digest, size = hashlib.sha256(), 0
        with open(path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            while data := file.read(_READ):
                digest.update(data)
                size += len(data)
            after = os.fstat(file.fileno())
        if _key(before) == _key(after) and size == after.st_size:
            break
        time.sleep(_PAUSE)
    return after, size, digest.hexdigest()


def _in_words(size: int) -> str:
    return f"{size / (1 << 20):.0f} MB" if size >= 1 << 20 else f"{size} bytes"
