# SPDX-License-Identifier: BSD-3-Clause
"""List the files of a workspace with their digests, pack their contents, and compute the hash of a run's code.

Paths are relative, with ``/``; bytes that are not UTF-8 are Python's surrogate escapes. As in git, the only part of a
mode that counts is whether the owner may execute the file, and times do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import NamedTuple

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

PIECE = 1 << 19
"""Largest piece that is sent, and largest part of a file held in memory, in bytes."""

_LEVEL = 1
"""The zlib level. It compresses source code to a quarter at 100 MB/s; higher levels take longer than they save."""


def is_home_or_root(folder: str) -> bool:
    """Whether a folder is the home folder or ``/``, by any of its names: these hold more than code, such as keys."""
    return any(os.path.exists(path) and os.path.samefile(folder, path) for path in ("/", os.path.expanduser("~")))


class TreeError(ValueError):
    """The received data is not a valid tree, or is unsafe to write to a disk; the message says why."""


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
        if not isinstance(self.content, str) or not isinstance(self.size, int):
            return False
        if self.is_file:
            return bool(_DIGEST.fullmatch(self.content)) and self.size >= 0
        has_target = bool(self.content) and "\0" not in self.content
        return self.size == 0 and (has_target if self.kind == LINK else self.kind == FOLDER and not self.content)


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
        """Sizes in bytes of the distinct file contents, by digest, in ascending order of the digests."""
        return dict(sorted((entry.content, entry.size) for entry in self.entries.values() if entry.is_file))

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
        """The size of all files in bytes."""
        return sum(entry.size for entry in self.entries.values())

    def files(self, root: str, digests: Iterable[str]) -> Iterator[tuple[str, int, str]]:
        """Yield digest, size in bytes and path of a file in the workspace ``root`` for each of some contents."""
        paths = {entry.content: path for path, entry in self.entries.items() if entry.is_file}
        return ((digest, self.contents[digest], os.path.join(root, paths[digest])) for digest in digests)

    def encode(self) -> bytes:
        """Serialise the tree for ``decode``."""
        return zlib.compress(json.dumps(self.entries, separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, data: bytes) -> Tree:
        """Deserialise a tree from untrusted bytes, and check it."""
        try:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(data, MAX_TREE)
            if not unpacker.eof:
                raise ValueError(f"its text is cut off, or longer than {MAX_TREE} bytes")
            tree = cls({path: Entry(*value) for path, value in json.loads(text).items()})
        except (zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TreeError(f"not a tree: {error}") from None
        tree.check()
        return tree

    def check(self) -> None:
        """Check that the tree can be written into a folder, without any path outside the folder."""
        if len(self.entries) > MAX_ENTRIES:
            raise TreeError(f"a tree has at most {MAX_ENTRIES} entries")
        sizes: dict[str, int] = {}
        for path, entry in self.entries.items():
            if _NO_PATH.search(path):
                raise TreeError(f"{path!r} is no path below a workspace")
            if not entry.is_valid:
                raise TreeError(f"{path!r} is no file, link or folder of a tree: {entry}")
            if entry.is_file and sizes.setdefault(entry.content, entry.size) != entry.size:
                raise TreeError(f"{path!r} has another size than a file of the same content")
        if wrong := self.parents & self.entries.keys():
            raise TreeError(f"something lies below {min(wrong)!r}, which is no folder with something in it")


class ChangedError(Exception):
    """A file does not have the expected content, as it had when its digest was taken; the message is its path."""


class PackError(ValueError):
    """The received data is not what was expected; the message says why."""


def pack(files: Iterable[tuple[str, int, str]]) -> Iterator[bytes]:
    """Yield the contents of some files, one after the other and compressed, in pieces of at most ``PIECE`` bytes.

    Args:
        files: digest (hex), size in bytes and path of each file.

    Raises:
        ChangedError: the content of a file does not match its size or digest.
    """
    packer = zlib.compressobj(_LEVEL)
    waiting = b""
    for digest, size, path in files:
        for data in _checked(digest, size, path):
            waiting += packer.compress(data)
            while len(waiting) >= PIECE:
                yield waiting[:PIECE]
                waiting = waiting[PIECE:]
    waiting += packer.flush()
    for start in range(0, len(waiting), PIECE):
        yield waiting[start : start + PIECE]


def _checked(digest: str, size: int, path: str) -> Iterator[bytes]:
    found, left = hashlib.sha256(), size
    try:
        with open(safe_files.open_file(path, any_owner=True), "rb", buffering=0) as file:
            while left:
                data = file.read(min(left, PIECE))
                if not data:
                    raise ChangedError(path)
                found.update(data)
                left -= len(data)
                if not left and found.hexdigest() != digest:
                    raise ChangedError(path)
                yield data
    except (FileNotFoundError, NotADirectoryError, safe_files.UnsafeFileError):
        raise ChangedError(path) from None


class Unpacker:
    """Unpack what calls of ``pack`` have made, piece by piece, and check the digest of each content.

    Attributes:
        missing: the number of contents that are not complete.

    Args:
        contents: sizes in bytes of the contents, by digest, in the order in which they arrive.
        folder: folder for contents that are not complete yet.
        keep: called with the digest and the path of each complete content; must move the file away.
    """

    def __init__(self, contents: Mapping[str, int], folder: str, keep: Callable[[str, str], None]) -> None:
        self.missing = len(contents)
        self._contents = contents
        self._folder = folder
        self._keep = keep
        self._unpacker = zlib.decompressobj()
        self._data = memoryview(b"")
        self._receiving = self._receive()
        next(self._receiving)

    def feed(self, piece: bytes) -> None:
        """Unpack the next piece."""
        while piece:
            if self._unpacker.eof:
                self._unpacker = zlib.decompressobj()
            try:
                data = self._unpacker.decompress(piece, PIECE)
            except zlib.error as error:
                raise PackError(f"the contents cannot be unpacked: {error}") from None
            piece = self._unpacker.unconsumed_tail or self._unpacker.unused_data
            if data:
                self._data = memoryview(data)
                self._receiving.send(None)

    def close(self) -> None:
        """Delete the content that is not complete yet, if there is one."""
        self._receiving.close()

    def _receive(self) -> Generator[None, None, None]:
        """Store the contents, one after the other; ``yield`` waits until there is data."""
        for digest, size in self._contents.items():
            path = os.path.join(self._folder, f"{digest}.part")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # a program may have put a FIFO or a link there
            try:
                with open(path, "xb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    found, left = hashlib.sha256(), size
                    while left:
                        if not self._data:
                            yield
                        some, self._data = self._data[:left], self._data[left:]
                        left -= len(some)
                        found.update(some)
                        safe_files.write_all(file.fileno(), some)
                if found.hexdigest() != digest:
                    raise PackError(f"the file received as {digest} has another digest")
                self._keep(digest, path)
                self.missing -= 1
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                raise
        if not self._data:
            yield
        raise PackError("more contents arrived than were requested")
