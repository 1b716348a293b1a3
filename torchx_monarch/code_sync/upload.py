# SPDX-License-Identifier: BSD-3-Clause
"""Pack a workspace into an upload, and unpack it where it arrives.

An upload is a gzip file. Its first line is a JSON object with the ``tree`` and the digests of the ``contents`` that
follow, one after the other: those that the receiver has not had. It is compressed once, and passed on as it is.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

from torchx_monarch.code_sync.manifest import MAX_TREE, Tree
from torchx_monarch.system import safe_files

PIECE = 1 << 19
"""Largest part of a file or an upload that is sent or held in memory, in bytes."""

_LEVEL = 1
"""The level of compression. It takes source code to a quarter at 100 MB/s; higher ones take longer than they save."""


class ChangedError(Exception):
    """A file does not have the content any more that it had when its digest was taken; the message is its path."""


class UploadError(Exception):
    """What was received is no valid upload, or code is not on this host; the message says why."""


def copy(read: Callable[[int], bytes], write: Callable[[bytes], object], size: int = sys.maxsize) -> str:
    """Copy bytes up to the end of a file, at most ``size``, and return their digest: SHA-256 in hex."""
    found = hashlib.sha256()
    while size and (data := read(min(size, PIECE))):
        found.update(data)
        write(data)
        size -= len(data)
    return found.hexdigest()


def pack(root: str, tree: Tree, digests: Sequence[str], file: BinaryIO) -> int:
    """Write an upload of the workspace ``root`` with some of its contents into a file; return its size in bytes.

    Raises:
        ChangedError: the content of a file does not match the tree.
    """
    paths = {entry.content: path for path, entry in tree.entries.items() if entry.is_file}
    with gzip.open(file, "wb", _LEVEL) as packed:
        packed.write(json.dumps({"tree": tree.entries, "contents": digests}).encode() + b"\n")
        for digest in digests:
            path = os.path.join(root, paths[digest])
            try:
                descriptor = safe_files.open_file(path, any_owner=True)
            except OSError:
                raise ChangedError(path) from None
            with open(descriptor, "rb", buffering=0) as content:
                if copy(content.read, packed.write, tree.contents[digest]) != digest:
                    raise ChangedError(path)
    size = file.tell()
    file.seek(0)
    return size


class Upload:
    """An upload that was received, in files without names: no program finds them, and they need no removal.

    Attributes:
        name: identifies the upload on all hosts; sorts after those of earlier ones.
        size: size in bytes of what has arrived.
        tree: its tree, after ``unpack``.
        contents: offsets and sizes in bytes of its unpacked contents, by digest.

    Args:
        folder: path of a folder on the file system for the files.
        size: bytes to reserve, so that ``append`` does not find the disk full.
    """

    tree: Tree

    def __init__(self, folder: str, name: str = "", size: int = 0) -> None:
        self.name = name
        self.size = 0
        self.contents: dict[str, tuple[int, int]] = {}
        with contextlib.ExitStack() as files:
            self._packed = files.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            self._unpacked = files.enter_context(tempfile.TemporaryFile(dir=folder))
            if size:
                os.posix_fallocate(self._packed.fileno(), 0, size)
            weakref.finalize(self, files.pop_all().close)

    def append(self, piece: bytes) -> None:
        safe_files.write_all(self._packed.fileno(), piece)
        self.size += len(piece)

    def read(self, start: int) -> bytes:
        """Return the upload from an offset on, at most ``PIECE`` bytes."""
        return os.pread(self._packed.fileno(), PIECE, start)

    def unpack(self, make_room: Callable[[int], None]) -> None:
        """Unpack the contents, and check their digests.

        Args:
            make_room: called with the bytes that the contents, and a copy of the workspace, will take.
        """
        self._packed.seek(0)
        try:
            with gzip.open(self._packed) as stream:
                first = json.loads(stream.readline(MAX_TREE))
                self.tree = Tree.decode(first["tree"])
                sizes = [(digest, self.tree.contents[digest]) for digest in first["contents"]]
                make_room(sum(size for _, size in sizes) + self.tree.size)
                for digest, size in sizes:
                    self.contents[digest] = self._unpacked.tell(), size
                    if copy(stream.read, self._unpacked.write, size) != digest:
                        raise UploadError(f"the content received as {digest} has another digest")
                if stream.read(1):
                    raise UploadError("more contents arrived than were announced")
            self._unpacked.flush()
        except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, LookupError, TypeError, RecursionError) as error:
            raise UploadError(f"the code cannot be unpacked: {error}") from None

    def content(self, digest: str) -> bytes:
        start, size = self.contents[digest]
        return os.pread(self._unpacked.fileno(), size, start)
