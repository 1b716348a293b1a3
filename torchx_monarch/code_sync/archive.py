# SPDX-License-Identifier: BSD-3-Clause
"""Pack and unpack file contents for the network.

An archive is one zlib stream of records. Each record is a SHA-256 digest (32 bytes), a size (8 bytes, big endian) and
the content.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torchx_monarch.system import run_dirs, safe_files

PIECE = 1 << 19
"""Largest piece of an archive, and largest part of a file held in memory, in bytes."""

_LEVEL = 1
"""The zlib level. It compresses source code to a quarter at 100 MB/s; higher levels take longer than they save."""

_HEAD = 40
"""Length of a record's header (digest and size) in bytes."""


class ChangedError(Exception):
    """A file does not have the expected content, as it had when its digest was taken; the message is its path."""


class PackError(ValueError):
    """The received data is not the expected archive; the message says why."""


def pack(files: Iterable[tuple[str, int, str]]) -> Iterator[bytes]:
    """Yield the archive of some files in pieces of at most ``PIECE`` bytes.

    Args:
        files: digest (hex), size in bytes and path of each file.

    Raises:
        ChangedError: the content of a file does not match its size or digest.
        OSError: a file cannot be read.
    """
    packer = zlib.compressobj(_LEVEL)
    waiting = b""
    for digest, size, path in files:
        for data in _record(digest, size, path):
            waiting += packer.compress(data)
            while len(waiting) >= PIECE:
                yield waiting[:PIECE]
                waiting = waiting[PIECE:]
    waiting += packer.flush()
    for start in range(0, len(waiting), PIECE):
        yield waiting[start : start + PIECE]


def _record(digest: str, size: int, path: str) -> Iterator[bytes]:
    found, left = hashlib.sha256(), size
    try:
        with open(safe_files.open_file(path, any_owner=True), "rb", buffering=0) as file:
            yield bytes.fromhex(digest) + size.to_bytes(8, "big")
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
    """Unpack an archive piece by piece, and check the digest of each content.

    Args:
        expected: sizes in bytes of the contents that the archive may hold, by digest.
        wanted: digests of the contents to keep. The others are skipped: an archive for all hosts may hold contents that
            this host has already.
        folder: folder for contents that are not complete yet.
        keep: called with the digest and the path of each complete content; must move the file away.
    """

    def __init__(
        self, expected: Mapping[str, int], wanted: Iterable[str], folder: str, keep: Callable[[str, str], None]
    ) -> None:
        self._expected = expected
        self._wanted = set(wanted)
        self._folder = folder
        self._keep = keep
        self._unpacker = zlib.decompressobj()
        self._head = b""
        self._digest = ""
        self._left = 0
        self._found = hashlib.sha256()
        self._file = -1

    @property
    def missing(self) -> int:
        """The number of wanted contents that have not been received."""
        return len(self._wanted)

    def feed(self, piece: bytes) -> None:
        """Unpack the next piece of the archive.

        Raises:
            PackError: the data is not zlib, or a content is not expected or has the wrong digest.
            OSError: a content cannot be written.
        """
        while piece:
            try:
                data = self._unpacker.decompress(piece, PIECE)
            except zlib.error as error:
                raise PackError(f"the contents cannot be unpacked: {error}") from None
            piece = self._unpacker.unconsumed_tail
            self._take(memoryview(data))
            if self._unpacker.eof or not data:
                break

    def close(self) -> None:
        """Delete the content that is not complete yet, if there is one."""
        if self._file >= 0:
            os.close(self._file)
            os.unlink(self._path)
            self._file = -1

    @property
    def _path(self) -> str:
        return os.path.join(self._folder, f"{self._digest}.part")

    def _take(self, data: memoryview) -> None:
        while data:
            if not self._digest:
                data = self._begin(data)
                continue
            some, data = data[: self._left], data[self._left :]
            self._left -= len(some)
            if self._file >= 0:
                self._found.update(some)
            while some and self._file >= 0:
                some = some[os.write(self._file, some) :]
            self._end_if_complete()

    def _begin(self, data: memoryview) -> memoryview:
        lacks = _HEAD - len(self._head)
        self._head += data[:lacks]
        if len(self._head) == _HEAD:
            self._digest, self._left = self._head[:32].hex(), int.from_bytes(self._head[32:], "big")
            self._head = b""
            if self._expected.get(self._digest) != self._left:
                raise PackError(f"{self._left} bytes of the digest {self._digest} arrived that were not requested")
            self._found = hashlib.sha256()
            if self._digest in self._wanted:
                if os.path.lexists(self._path):  # a program that runs here may have put anything there
                    run_dirs.remove_tree(self._path)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._end_if_complete()
        return data[lacks:]

    def _end_if_complete(self) -> None:
        if self._left:
            return
        if self._file >= 0:
            if self._found.hexdigest() != self._digest:
                self.close()
                raise PackError(f"the file received as {self._digest} has another digest")
            os.close(self._file)
            self._file = -1
            self._keep(self._digest, self._path)
            self._wanted.discard(self._digest)
        self._digest = ""
