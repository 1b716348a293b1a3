# SPDX-License-Identifier: BSD-3-Clause
"""Scan a workspace on the local disk into a tree."""

from __future__ import annotations

import hashlib
import os
import stat

from torchx_monarch.code_sync.ignores import GIT_IGNORE, IgnoreRules
from torchx_monarch.code_sync.manifest import EXECUTABLE, FILE, FOLDER, LINK, MAX_ENTRIES, Entry, Tree

_READ = 1 << 20
"""Bytes of a file to read with one call."""

_MAX_FILE_BYTES, _MAX_TOTAL_BYTES = 100 << 20, 1 << 30
"""The largest size of a file and of all files: a larger folder is assumed to hold more than code."""


class ScanError(Exception):
    """A workspace cannot be scanned or exceeds the limits; the message says what to do about it."""


def scan(root: str) -> Tree:
    """Scan a workspace, the absolute path of a folder.

    It reads every file, of which a thousand take 50 ms: a cache by size and times would save half of it.
    """
    if not os.path.isdir(root):
        raise ScanError(f"the workspace {root} is no folder")
    try:
        return _Scan(root).run()
    except OSError as error:
        raise ScanError(
            f"cannot read {error.filename} of the workspace: {error.strerror}; what is not for the hosts can be "
            "named in .torchxignore or .gitignore"
        ) from None


class _Scan:
    def __init__(self, root: str) -> None:
        self._root = root
        self._entries: dict[str, Entry] = {}
        self._files: list[str] = []
        self._size = 0

    def run(self) -> Tree:
        """Walk the folders, then read the files. Checks the limits before reading."""
        folders = [("", IgnoreRules.load(self._root))]
        while folders:
            folder, rules = folders.pop()
            try:
                with os.scandir(os.path.join(self._root, folder)) as found:
                    inside = list(found)
            except FileNotFoundError:
                continue
            if any(entry.name == GIT_IGNORE for entry in inside):
                rules = rules.below(self._root, folder)
            taken = 0
            for entry in inside:
                path = f"{folder}/{entry.name}" if folder else entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                is_ignored, below = rules.leave_out(path, is_folder)
                taken += not is_ignored
                if is_folder and not is_ignored:
                    folders.append((path, below))
                elif not is_ignored:
                    self._add(path, entry)
            if folder and not taken:
                self._entries[folder] = Entry(FOLDER, "", 0)
            if len(self._entries) + len(self._files) > MAX_ENTRIES:
                raise ScanError(
                    f"the workspace {self._root} has more than {MAX_ENTRIES} files: name a smaller folder as "
                    "the workspace, or what is not code in .torchxignore or .gitignore"
                )
        if self._size > _MAX_TOTAL_BYTES:
            raise ScanError(
                f"the files of the workspace {self._root} have {_in_words(self._size)}, and code at most "
                f"{_in_words(_MAX_TOTAL_BYTES)}: name what is not code in .torchxignore or .gitignore"
            )
        for path in self._files:
            self._read(path)
        return Tree(self._entries)

    def _add(self, path: str, found: os.DirEntry[str]) -> None:
        try:
            if found.is_symlink():
                self._entries[path] = Entry(LINK, os.readlink(found.path), 0)
                return
            status = found.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISREG(status.st_mode):  # sockets and pipes are meaningless on another machine
            self._limit(path, status.st_size)
            self._size += status.st_size
            self._files.append(path)

    def _read(self, path: str) -> None:
        digest, size = hashlib.sha256(), 0
        try:
            with open(os.path.join(self._root, path), "rb", buffering=0) as file:
                is_executable = os.fstat(file.fileno()).st_mode & stat.S_IXUSR
                while data := file.read(_READ):
                    digest.update(data)
                    size += len(data)
        except FileNotFoundError:
            return
        self._limit(path, size)
        self._entries[path] = Entry(EXECUTABLE if is_executable else FILE, digest.hexdigest(), size)

    def _limit(self, path: str, size: int) -> None:
        if size > _MAX_FILE_BYTES:
            raise ScanError(
                f"{os.path.join(self._root, path)} has {_in_words(size)}, and a file of code at most "
                f"{_in_words(_MAX_FILE_BYTES)}: name it in .torchxignore or .gitignore"
            )


def _in_words(size: int) -> str:
    return f"{size / (1 << 20):.0f} MB" if size >= 1 << 20 else f"{size} bytes"
