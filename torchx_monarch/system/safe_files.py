# SPDX-License-Identifier: BSD-3-Clause
"""Open and read files that another user or a rank may have planted, replaced or filled.

Every file that others can reach must be a regular file of the caller's and no symbolic link, and at most a stated
number of bytes is read from it. If the caller names a trusted folder, each folder between it and the file is checked in
the same way, and opened relative to a descriptor of its parent, so that no name can be exchanged between check and use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import select
import stat
import tempfile
from typing import IO, Any, TypeAlias

from torchx_monarch.system.untrusted_text import one_line

MAX_JSON_BYTES = 1024 * 1024
"""The maximum bytes read of a rank's error file, which torch itself keeps to a few kilobytes."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK: opening a FIFO does not wait, or fails for writing. O_NOCTTY: a terminal does not become the caller's."""

_MAX_DIGITS = 300
"""The maximum digits of an integer: the largest float has 309, and ``float(10**400)`` raises OverflowError."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_UNENCODABLE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""The surrogates for which ``os.fsencode`` raises UnicodeEncodeError; the others stand for bytes of file names."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
"""What ``numbered`` takes for a number. With more digits, the name after the highest could become too long for the file
system, or too long for what reads it."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_Path: TypeAlias = "str | os.PathLike[str]"


class UnsafeFileError(OSError):
    """Raised when a file or folder must not be used because of its type, its owner or its size.

    Attributes:
        filename: its path.
        strerror: what is wrong with it, to follow its path: ``"is a symbolic link"``.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(errno.EPERM, reason, path)

    def __str__(self) -> str:
        return f"{one_line(self.filename)} {self.strerror}"


def open_file(path: _Path, flags: int = os.O_RDONLY, *, below: _Path | None = None, any_owner: bool = False) -> int:
    """Open a regular file of the caller, never through a symbolic link; return its descriptor.

    Args:
        flags: as for ``os.open``; O_CREAT makes a missing file, of mode 0600. Do not give O_TRUNC: it would take effect
            before the file has been checked.
        below: a folder above ``path`` that the caller must own, and whose path may contain links; the folders between
            it and the file must belong to the caller and be no links. None: the folder of the file is not checked.
        any_owner: whether the file may belong to another user, because the caller checks its content.

    Raises:
        UnsafeFileError: the file, or a folder between ``below`` and it, breaks the rule.
    """
    path = os.fspath(path)
    if below is None:
        return _open_at(None, path, path, flags | _FILE, any_owner)
    folder = open_folder(os.path.dirname(path), below=below)
    try:
        return _open_at(folder, os.path.basename(path), path, flags | _FILE, any_owner)
    finally:
        os.close(folder)


def open_log(path: _Path) -> int:
    """Open a log file for appending as ``open_file`` does, and make it if there is none; return its descriptor.

    A link, a FIFO or a socket of that name, which a rank may have made ahead, is removed.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        return open_file(path, flags)
    except UnsafeFileError:
        if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            raise
    os.unlink(path)
    return open_file(path, flags | os.O_EXCL)


def open_folder(path: _Path, *, below: _Path) -> int:
    """Open a folder of the caller, ``below`` or one inside it; return its descriptor, for ``dir_fd`` and scandir."""
    current = os.path.abspath(below)
    way = os.path.relpath(os.path.abspath(path), current)
    parts = [] if way == os.curdir else way.split(os.sep)
    if os.pardir in parts:
        raise ValueError(f"{os.fspath(path)} does not lie below {current}")
    fd = _open_at(None, current, current, _FOLDER)
    for part in parts:
        current = os.path.join(current, part)
        try:
            inner = _open_at(fd, part, current, _FOLDER | os.O_NOFOLLOW)
        finally:
            os.close(fd)
        fd = inner
    return fd


def nameless_file() -> IO[bytes]:
    """Open a file without a name, in memory where Python has ``memfd_create``, which one for any glibc has not."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("torchx-monarch"), "r+b", 0)
    return tempfile.TemporaryFile(buffering=0)


def read_file(path: _Path, *, limit: int = MAX_JSON_BYTES, below: _Path | None = None) -> bytes:
    """Read all of a regular file of the caller (``open_file``); one of more than ``limit`` bytes is refused."""
    with open(open_file(path, below=below), "rb", buffering=0) as file:
        pieces, size = [], 0
        while size <= limit and (piece := file.read(min(limit + 1 - size, 1 << 20))):
            pieces.append(piece)
            size += len(piece)
    if size > limit:
        raise UnsafeFileError(os.fspath(path), f"is larger than {limit} bytes")
    return b"".join(pieces)


def read_json(path: _Path, *, limit: int = MAX_JSON_BYTES, below: _Path | None = None) -> Any:
    """Read and parse a JSON file of the caller (``read_file``, ``parse_json``)."""
    return parse_json(read_file(path, limit=limit, below=below))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted source into values that any reader can print, encode and calculate with.

    A number that is not finite, or too large for a float, becomes None. A surrogate that stands for no byte of a file
    name becomes U+FFFD.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply for the parser.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        value = _DECODER.decode(text)
        if _SURROGATE.search(text):
            value = _DECODER.decode(_UNENCODABLE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _integer(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MAX_DIGITS else None


def _fraction(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_fraction, parse_constant=lambda name: None)


def replace_file(path: str, data: bytes) -> None:
    """Write a file that only the caller may read, atomically, and replace any file of that name."""
    aside = f"{path}.{os.urandom(8).hex()}.tmp"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def numbered(folder: _Path, prefix: str) -> list[int]:
    """Return the numbers N of a folder's entries ``prefixN``, in no order; none if the folder cannot be read.

    Ranks can make any entry there. Only a number below a million, as the host itself would write it, counts.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    ends = (name[len(prefix) :] for name in names if name.startswith(prefix))
    return [int(end) for end in ends if _NUMBER.fullmatch(end)]


def make_reserve(path: str, size: int) -> None:
    """Make a file of a size, which holds disk space for ``write_into_reserve`` to use when the disk is full."""
    fd = open_file(path, os.O_WRONLY | os.O_CREAT)
    try:
        # Zeros take space on most file systems, but not on compressing ones.
        write_all(fd, os.urandom(size))
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def write_into_reserve(reserve: str, path: str, data: bytes) -> None:
    """Replace the file at ``path`` by a reserve file with new content, which needs no new space and no new inode."""
    fd = open_file(reserve, os.O_WRONLY)
    try:
        write_all(fd, data)
        os.ftruncate(fd, len(data))
        os.rename(reserve, path)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes; raise ``OSError`` if the disk is full, or the reader has closed the pipe."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # O_NONBLOCK is inherited and shared with other processes: clearing it affects them
            select.select([], [fd], [])


def _open_at(folder: int | None, name: str, path: str, flags: int, any_owner: bool = False) -> int:
    """Open a file, or with O_DIRECTORY a folder, of the caller; error messages call it ``path``."""
    is_folder = bool(flags & os.O_DIRECTORY)
    refused = {errno.ENOTDIR} if is_folder and folder is not None else set[int]()  # a link is no folder, either
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        # ELOOP: a link. ENXIO: a socket, or a FIFO without a reader opened for writing. EISDIR: a folder, for writing.
        if error.errno in refused | {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}:
            kind = "not a folder" if is_folder else "not a regular file"
            with contextlib.suppress(OSError):
                mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                kind = _KINDS.get(stat.S_IFMT(mode), kind)
            raise UnsafeFileError(path, f"is {kind}") from None
        error.filename = path
        raise
    try:
        found = os.fstat(fd)
        if not is_folder and not stat.S_ISREG(found.st_mode):
            raise UnsafeFileError(path, f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'not a regular file')}")
        if found.st_uid != os.geteuid() and not any_owner:
            raise UnsafeFileError(path, f"belongs to uid {found.st_uid}, not to uid {os.geteuid()}")
    except BaseException:
        os.close(fd)
        raise
    return fd
