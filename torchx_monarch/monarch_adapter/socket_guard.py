# SPDX-License-Identifier: BSD-3-Clause
"""A guard that restricts Monarch's abstract unix sockets to connections from this user and root.

Monarch 0.7 always listens on such sockets (docs/explanation/security.md). They have no file mode, no option turns them
off, and Monarch dials them itself. So the guard rejects connections by the peer's user id, which the kernel provides
(SO_PEERCRED): it replaces the ``accept4`` that Monarch's library imports by a Python function, in the library's GOT,
whose entries its ELF relocations name. The function holds the interpreter lock for some microseconds per connection, so
no thread may wait for the accepting thread while it holds that lock.

The guard can go when Monarch can serve without abstract sockets, or checks its peers itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

TESTED = ("0.7.0", "0.8.0.dev20261027")
"""Versions of Monarch with which tests/local/test_private_files.py has passed."""

_FUNCTIONS = ("accept4", "accept")

_CREDENTIALS = struct.Struct("=3i")

# 64-bit relocations that become the address of a symbol: in data, in the GOT, and in the PLT's part of the GOT.
_RELOCATIONS = {"x86_64": (1, 6, 7), "aarch64": (257, 1025, 1026)}

# Tags of a library's dynamic section (elf.h), then the layouts of Elf64_Rela and Elf64_Sym.
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ = 0, 2, 5, 6, 7, 8
_DT_JMPREL, _DT_RELACOUNT = 23, 0x6FFFFFF9
_RELA, _SYM = struct.Struct("=QQq"), struct.Struct("=IBBHQQ")

_RTLD_DI_LINKMAP = 2

_PROT_READ, _PROT_WRITE = mmap.PROT_READ, mmap.PROT_WRITE

# Keeps the callbacks alive: the library calls them until the process ends.
_callbacks: list[Any] = []

_called = False


def protect(library: str, version: str, warn: Callable[[str], None]) -> None:
    """Install the guard in this process. Only the first call has an effect.

    From then on the library rejects connections over unix sockets from users other than this one and root. A rejected
    peer reads the end of the connection. The library gets ECONNABORTED, as if the peer had closed the connection before
    it was accepted. Sockets of other families are not affected.

    Args:
        library: path of the file of Monarch's library, which is loaded.
        version: version of Monarch; empty if unknown.
        warn: called at most once, with a line for the log if the guard is off, or not tested with this version.
    """
    global _called
    if _called:
        return
    _called = True
    risk = "Other users of this machine might connect to Monarch and run code here"
    shown = version or "of unknown version"
    try:
        redirect(library, {name: _replacement(name) for name in _FUNCTIONS})
    except ImportsUnknown as error:
        warn(f"the guard of Monarch's sockets is off (Monarch {shown}): {error}. {risk}")
        return
    if version.partition("+")[0] not in TESTED:
        warn(f"the guard of Monarch's sockets is not tested with Monarch {shown}, which may go around it. {risk}")


def _replacement(name: str) -> int:
    """Return the address of a C function that replaces ``accept`` or ``accept4``."""
    flags = [ctypes.c_int] if name == "accept4" else []
    # use_errno: the caller gets the errno that ctypes keeps for this thread, set by the real function or ``set_errno``.
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *flags, use_errno=True)
    real: Callable[..., int] = prototype((name, ctypes.CDLL(None, use_errno=True)))
    ours = os.geteuid()

    def accept(*arguments: Any) -> int:
        connection = real(*arguments)
        if connection < 0 or _allowed(connection, ours):
            return connection
        with contextlib.suppress(OSError):
            os.close(connection)
        ctypes.set_errno(errno.ECONNABORTED)
        return -1

    callback = prototype(accept)
    _callbacks.append(callback)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    return address


def _allowed(connection: int, ours: int) -> bool:
    try:
        peer = socket.socket(fileno=connection)
        try:
            if peer.family != socket.AF_UNIX:
                return True
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return _CREDENTIALS.unpack(credentials)[1] in (ours, 0)
        finally:
            peer.detach()
    except Exception:  # the caller is C code: nothing could handle an exception
        return False


class ImportsUnknown(Exception):
    """The imports of the library cannot be found or replaced; the message says why."""


class _LinkMap(ctypes.Structure):
    _fields_ = [("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t)]


def redirect(library: str, functions: Mapping[str, int]) -> None:
    """Have a loaded library call other C functions, of these addresses, than those of these names that it imports."""
    try:
        found = list(entries(library, tuple(functions)))
        for name, entry in found:
            _write(entry, functions[name])
    except (OSError, AttributeError, MemoryError, struct.error) as error:
        raise ImportsUnknown(f"{library}: {error}") from error
    if not found:
        raise ImportsUnknown(f"{library} calls none of {', '.join(functions)} by a name that can be led elsewhere")


def entries(library: str, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield the names of functions that a loaded library imports, each with the address of a GOT entry for it."""
    types = _RELOCATIONS.get(platform.machine())
    if types is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise ImportsUnknown(f"not known how on {platform.machine()}, only on {' and '.join(_RELOCATIONS)}")
    link_map = ctypes.POINTER(_LinkMap)()
    handle = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), _RTLD_DI_LINKMAP, ctypes.byref(link_map)) != 0:
        raise OSError(f"dlinfo does not know {library}")
    base = link_map.contents.base
    tags = _dynamic(link_map.contents.dynamic)

    def address(tag: int) -> int:
        # glibc relocates these addresses when it loads the library; other loaders leave them as in the file.
        value = tags.get(tag, 0)
        return value if value >= base else base + value

    # Skip the relative relocations, which come first and have no symbol: hundreds of thousands in a large library.
    skipped = tags.get(_DT_RELACOUNT, 0) * _RELA.size
    tables = [
        (address(_DT_RELA) + skipped, tags.get(_DT_RELASZ, 0) - skipped),
        (address(_DT_JMPREL), tags.get(_DT_PLTRELSZ, 0)),
    ]
    for start, size in tables:
        for offset, info, addend in _RELA.iter_unpack(ctypes.string_at(start, max(0, size))):
            if info & 0xFFFFFFFF not in types or addend or not info >> 32:
                continue
            symbol = ctypes.string_at(address(_DT_SYMTAB) + (info >> 32) * _SYM.size, _SYM.size)
            name = ctypes.string_at(address(_DT_STRTAB) + _SYM.unpack(symbol)[0]).decode()
            if name in names:
                yield name, base + offset


def _dynamic(at: int) -> dict[int, int]:
    tags: dict[int, int] = {}
    while (entry := struct.unpack("=QQ", ctypes.string_at(at, 16)))[0] != _DT_NULL:
        tags[entry[0]] = entry[1]
        at += 16
    return tags


def _write(entry: int, value: int) -> None:
    """Write an entry of the GOT, which is read-only memory once the library is loaded (RELRO)."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(entry & -mmap.PAGESIZE)
    read_only = not _writable(entry)
    if read_only and libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), _PROT_READ | _PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.c_size_t.from_address(entry).value = value
    if read_only:
        libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), _PROT_READ)


def _writable(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return line.split()[1][1] == "w"
    raise OSError(f"no memory at {address:#x}")
