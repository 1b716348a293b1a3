# SPDX-License-Identifier: BSD-3-Clause
"""Scan a workspace on the local disk into a tree, without reading unchanged files again.

The scan caches the digest of each file with its size, times and inode number, as git's index does. File times may be
too coarse to reveal a change that happens right after a file is read. So a file that changed less than
``_SETTLED_AFTER`` seconds before the scan is not cached (see Documentation/technical/racy-git in git).
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

from torchx_monarch.code_sync.ignores import GIT_IGNORE, IgnoreRules
from torchx_monarch.code_sync.manifest import EXECUTABLE, FILE, FOLDER, LINK, MAX_ENTRIES, Entry, Tree
from torchx_monarch.system import safe_files

_VERSION = 1

_SETTLED_AFTER = 2.0
"""Seconds. FAT has the coarsest file times, a resolution of 2 s; local file systems have that of a kernel tick."""

_READ = 1 << 20
"""Bytes of a file to read with one call."""

_PASSES = 5
"""Largest number of passes over a workspace that changes during the scan."""

_MAX_CACHE_BYTES = 256 << 20
"""Largest size of a file with cached values: a million files have about half of it."""

_SAVE_THRESHOLD = 100
"""The cache is written to disk only if the ignore rules or more than this number of entries changed: reading a few
files again is faster than writing the whole cache."""

_MAX_FILE_BYTES, _MAX_TOTAL_BYTES = 100 << 20, 1 << 30
"""The largest size of a file and of all files: a larger folder is assumed to hold more than code."""


class ScanError(Exception):
    """A workspace cannot be scanned or exceeds the limits; the message says what to do about it."""


CachedFile = tuple[int, int, int, int, str]
"""Cached values of a file: size in bytes, mtime and ctime in nanoseconds, inode number, digest."""


@dataclasses.dataclass
class StatCache:
    """The cached results of earlier scans of a workspace.

    Attributes:
        files: cached values of each file, by path.
        rules: digest of the ignore rules of each folder, by path.
        left_out: paths that the rules ignore; a folder's path ends in ``/``.
    """

    files: dict[str, CachedFile] = dataclasses.field(default_factory=dict)
    rules: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def load(cls, path: str, root: str) -> StatCache:
        """Read the cache of the workspace ``root``; return an empty one if the file is missing or unusable.

        The cache decides which files are not read. So its folder and that above it must be the caller's, as must it.
        """
        try:
            values: Any = safe_files.read_json(path, limit=_MAX_CACHE_BYTES, below=_state_dir(path))
            if values["version"] == _VERSION and values["root"] == root:
                files = {
                    name: (int(size), int(mtime), int(ctime), int(inode), str(digest))
                    for name, (size, mtime, ctime, inode, digest) in values["files"].items()
                }
                return cls(
                    files,
                    dict(values["rules"].items()),
                    set(values["left_out"]),
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return cls()

    def save(self, path: str, root: str) -> None:
        """Write the cache to a file. Ignores errors: without a cache, the next scan reads all files."""
        values = {
            "version": _VERSION,
            "root": root,
            "files": self.files,
            "rules": self.rules,
            "left_out": sorted(self.left_out),
        }
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.close(safe_files.open_folder(os.path.dirname(path), below=_state_dir(path)))
            safe_files.replace_file(path, json.dumps(values, separators=(",", ":")).encode())


def _state_dir(path: str) -> str:
    return os.path.dirname(os.path.dirname(path))


_stat_caches: dict[str, StatCache] = {}
"""Caches in memory, by the path of the file that stores each."""


def scan(root: str, memory: StatCache) -> Tree:
    """Scan a workspace into a tree that represents one moment.

    Repeats the scan until a pass reads no file or agrees with the previous pass, because saving several files or
    checking out another branch takes a moment. Files that change all the time count as last read.

    Args:
        root: absolute path of the workspace.
        memory: the cache of earlier scans. The values of its fields are replaced, not mutated.
    """
    if not os.path.isdir(root):
        raise ScanError(f"the workspace {root} is no folder")
    before: Tree | None = None
    for _ in range(_PASSES):
        scan_pass = _Pass(root, memory)
        try:
            tree = scan_pass.run()
        except OSError as error:
            raise ScanError(
                f"cannot read {error.filename} of the workspace: {error.strerror}; what is not for the hosts can be "
                "named in .torchxignore or .gitignore"
            ) from None
        memory.files, memory.rules, memory.left_out = scan_pass.files, scan_pass.rules, scan_pass.left_out
        if not scan_pass.read or tree == before:
            break
        before = tree
    return tree


def scan_cached(root: str, state_dir: str) -> Tree:
    """Scan a workspace, with its cache in memory and in the state directory."""
    path = os.path.join(state_dir, "sync", f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}.json")
    memory = _stat_caches.get(path) or _stat_caches.setdefault(path, StatCache.load(path, root))
    before = memory.files, memory.rules, memory.left_out
    tree = scan(root, memory)
    much = len(memory.files.items() ^ before[0].items()) > _SAVE_THRESHOLD
    if much or (memory.rules, memory.left_out) != before[1:]:
        memory.save(path, root)
    return tree


class _Pass:
    """One pass over a workspace.

    Attributes:
        read: number of files that were read, or disappeared before they were read; 0 if the cache held everything.
        files, rules, left_out: the new content of the ``StatCache``.
    """

    def __init__(self, root: str, memory: StatCache) -> None:
        self.read = 0
        self.files: dict[str, CachedFile] = {}
        self.rules: dict[str, str] = {}
        self.left_out: set[str] = set()
        self._root = root
        self._memory = memory
        self._settled = time.time_ns() - int(_SETTLED_AFTER * 1e9)
        self._entries: dict[str, Entry] = {}
        self._found: list[tuple[str, str]] = []
        self._size = 0

    def run(self) -> Tree:
        """Walk the folders, then read the files that are not cached. Checks the limits before reading."""
        folders = [("", IgnoreRules.load(self._root))]
        while folders:
            folder, rules = folders.pop()
            try:
                with os.scandir(os.path.join(self._root, folder)) as found:
                    inside = list(found)
            except FileNotFoundError:
                self.read += 1
                continue
            if any(entry.name == GIT_IGNORE for entry in inside):
                rules = rules.below(self._root, folder)
            self.rules[folder] = rules.digest
            paths = [(f"{folder}/{entry.name}" if folder else entry.name, entry) for entry in inside]
            taken = [(path, entry, below) for path, entry in paths if (below := self._rules_below(path, entry, rules))]
            for path, entry, below in taken:
                if entry.is_dir(follow_symlinks=False):
                    folders.append((path, below))
                else:
                    self._add(path, entry)
            if folder and not taken:
                self._entries[folder] = Entry(FOLDER, "", 0)
            if len(self._entries) + len(self._found) > MAX_ENTRIES:
                raise ScanError(
                    f"the workspace {self._root} has more than {MAX_ENTRIES} files: name a smaller folder as "
                    "the workspace, or what is not code in .torchxignore or .gitignore"
                )
        if self._size > _MAX_TOTAL_BYTES:
            raise ScanError(
                f"the files of the workspace {self._root} have {_in_words(self._size)}, and code at most "
                f"{_in_words(_MAX_TOTAL_BYTES)}: name what is not code in .torchxignore or .gitignore"
            )
        for path, where in self._found:
            self._read(path, where)
        return Tree(self._entries)

    def _rules_below(self, path: str, found: os.DirEntry[str], rules: IgnoreRules) -> IgnoreRules | None:
        """Return the rules for what is below a path of a folder with these rules; None if it is ignored."""
        is_folder = found.is_dir(follow_symlinks=False)
        name = f"{path}/" if is_folder else path
        # Matching patterns is slow: skip it for paths that the cache has under the same rules.
        same_rules = self._memory.rules.get(os.path.dirname(path)) == rules.digest
        if same_rules and not is_folder and path in self._memory.files:
            return rules
        is_ignored = same_rules and name in self._memory.left_out
        if not is_ignored:
            is_ignored, rules = rules.leave_out(path, is_folder)
        if is_ignored:
            self.left_out.add(name)
            return None
        return rules

    def _add(self, path: str, found: os.DirEntry[str]) -> None:
        """Add a link, or a file that is as in the cache; a file that is not is read later."""
        try:
            if found.is_symlink():
                self._entries[path] = Entry(LINK, os.readlink(found.path), 0)
                return
            status = found.stat(follow_symlinks=False)
        except FileNotFoundError:
            self.read += 1
            return
        if not stat.S_ISREG(status.st_mode):  # sockets and pipes are meaningless on another machine
            return
        self._limit(path, status.st_size)
        self._size += status.st_size
        cached = self._memory.files.get(path)
        if cached and cached[:4] == _key(status):
            self.files[path] = cached
            self._entries[path] = _entry(status, cached[4], cached[0])
        else:
            self._found.append((path, found.path))

    def _read(self, path: str, where: str) -> None:
        self.read += 1
        try:
            status, size, digest = _hash(where)
        except FileNotFoundError:
            return
        self._limit(path, size)
        if max(status.st_mtime_ns, status.st_ctime_ns) < self._settled:
            self.files[path] = (*_key(status), digest)
        self._entries[path] = _entry(status, digest, size)

    def _limit(self, path: str, size: int) -> None:
        if size > _MAX_FILE_BYTES:
            raise ScanError(
                f"{os.path.join(self._root, path)} has {_in_words(size)}, and a file of code at most "
                f"{_in_words(_MAX_FILE_BYTES)}: name it in .torchxignore or .gitignore"
            )


def _entry(status: os.stat_result, digest: str, size: int) -> Entry:
    return Entry(EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE, digest, size)


def _key(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _hash(path: str) -> tuple[os.stat_result, int, str]:
    """Read a file; return its status before that, and the size in bytes and the digest of what was read."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        while data := file.read(_READ):
            digest.update(data)
            size += len(data)
    return status, size, digest.hexdigest()


def _in_words(size: int) -> str:
    return f"{size / (1 << 20):.0f} MB" if size >= 1 << 20 else f"{size} bytes"
