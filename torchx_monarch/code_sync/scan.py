# SPDX-License-Identifier: BSD-3-Clause
"""Scan a workspace on the local disk into a tree."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator

from torchx_monarch.code_sync.ignores import GIT_IGNORE, IgnoreRules
from torchx_monarch.code_sync.manifest import EXECUTABLE, FILE, FOLDER, LINK, MAX_ENTRIES, Entry, Tree
from torchx_monarch.code_sync.upload import ChangedError, copy

_MAX_FILE_BYTES, _MAX_TOTAL_BYTES = 100 << 20, 1 << 30
"""The largest size of a file and of all files: a larger folder is assumed to hold more than code."""

_HINT = "name what is not code in .torchxignore or .gitignore"

_TRIES = 5
"""Number of attempts to send a workspace that changes between scan and transfer."""


class ScanError(Exception):
    """A workspace cannot be scanned or exceeds the limits; the message says what to do about it."""


def scan(root: str) -> Tree:
    """Scan a workspace, the absolute path of a folder.

    It reads every file, of which a thousand take 50 ms: a cache by size and times would save half of it.
    """
    if not os.path.isdir(root):
        raise ScanError(f"the workspace {root} is no folder")
    try:
        return Tree(_entries(root))
    except OSError as error:
        raise ScanError(f"cannot read {error.filename} of the workspace: {error.strerror}; {_HINT}") from None


def scan_and_send(root: str, send: Callable[[Tree], object]) -> str:
    """Scan a workspace and send it, and again if a file changes meanwhile; return the hash of its tree.

    Args:
        send: sends the contents of a tree; raises ``ChangedError`` if a file does not have the one in the tree.
    """
    for _ in range(_TRIES):
        tree = scan(root)
        try:
            send(tree)
            return tree.hash
        except ChangedError as error:
            changing = error
    raise ScanError(f"{changing} changes all the time: {_HINT}")


def _entries(root: str) -> dict[str, Entry]:
    """Walk the folders, then read the files; the limits are checked before that."""
    entries, files, total = dict[str, Entry](), list[str](), 0
    for path, found in _walk(root):
        with contextlib.suppress(FileNotFoundError):
            if found is None:
                entries[path] = Entry(FOLDER, "", 0)
            elif found.is_symlink():
                entries[path] = Entry(LINK, os.readlink(found.path), 0)
            elif found.is_file(follow_symlinks=False):  # sockets and pipes are meaningless on another machine
                size = found.stat(follow_symlinks=False).st_size
                if size > _MAX_FILE_BYTES:
                    limit = _in_words(_MAX_FILE_BYTES)
                    raise ScanError(f"{found.path} has {_in_words(size)}, and a file of code at most {limit}: {_HINT}")
                total += size
                files.append(path)
        if len(entries) + len(files) > MAX_ENTRIES:
            raise ScanError(f"the workspace {root} has more than {MAX_ENTRIES} files: name a smaller one, or {_HINT}")
    if total > _MAX_TOTAL_BYTES:
        limit = _in_words(_MAX_TOTAL_BYTES)
        raise ScanError(f"the files of the workspace {root} have {_in_words(total)}, and code at most {limit}: {_HINT}")
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            entries[path] = _read(os.path.join(root, path))
    return entries


def _walk(root: str) -> Iterator[tuple[str, os.DirEntry[str] | None]]:
    """Yield what is not ignored, but for folders, of which the empty ones are yielded with None."""
    folders = [("", IgnoreRules.load(root))]
    while folders:
        folder, rules = folders.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as found:
                inside = list(found)
        except FileNotFoundError:
            continue
        if any(entry.name == GIT_IGNORE for entry in inside):
            rules = rules.below(root, folder)
        is_empty = bool(folder)
        for entry in inside:
            path = f"{folder}/{entry.name}" if folder else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            is_ignored, below = rules.leave_out(path, is_folder)
            is_empty = is_empty and is_ignored
            if is_folder and not is_ignored:
                folders.append((path, below))
            elif not is_ignored:
                yield path, entry
        if is_empty:
            yield folder, None


def _read(path: str) -> Entry:
    with open(path, "rb", buffering=0) as file:
        kind = EXECUTABLE if os.fstat(file.fileno()).st_mode & stat.S_IXUSR else FILE
        return Entry(kind, copy(file.read, lambda data: None), file.tell())


def _in_words(size: int) -> str:
    return f"{size / (1 << 20):.0f} MB" if size >= 1 << 20 else f"{size} bytes"
