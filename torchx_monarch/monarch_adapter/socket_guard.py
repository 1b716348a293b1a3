# SPDX-License-Identifier: BSD-3-Clause
"""A guard that restricts Monarch's abstract unix sockets to connections from this user and root.

Monarch 0.7 listens on *abstract* unix sockets in the process of its worker loop (``ChannelTransport::Unix``), whatever
address it serves. Such a socket has a name in ``/proc/net/unix`` and no file mode: every user in the same network
namespace can connect, and a client can run any code in this process. No option turns these sockets off, and Monarch
dials them itself, so they must stay open. The guard therefore rejects connections by the peer's user id, which the
kernel provides (SO_PEERCRED).

The guard replaces the ``accept4`` that Monarch's library imports by a Python function. The
function holds the interpreter lock for some microseconds per connection, so no thread may wait for the accepting thread
while it holds that lock.

A later Monarch may accept connections in another way. With a version that is not among ``TESTED`` the guard therefore
stays on only if it proves itself: it connects to the sockets of this process and must see each of its own connections
being accepted.

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
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

TESTED = ("0.7.0",)
"""Versions of Monarch with which tests/local/test_other_users.py has passed."""

_FUNCTIONS = ("accept4", "accept")

_SOCKET_TIMEOUT = 30.0
"""Seconds for Monarch to open its first abstract socket, where the guard must prove itself. 0.7 takes under one."""

_PROOF_TIMEOUT = 5.0
"""Seconds for Monarch to accept a connection of the proof."""

_CREDENTIALS = struct.Struct("=3i")

# Keeps the callbacks alive: the library calls them until the process ends.
_callbacks: list[Any] = []

_proofs: dict[bytes, threading.Event] = {}
"""The connections of the proof by the name of their own end; the event is set when the guard has seen one."""

_called = False

_RELOCATIONS = {"x86_64": (1, 6, 7), "aarch64": (257, 1025, 1026)}

_RTLD_DI_LINKMAP = 2


class GuardOff(Exception):
    """The guard cannot prove itself; the message says why."""


def protect(library: str, version: str, warn: Callable[[str], None]) -> None:
    """Install the guard in this process. Only the first call has an effect.

    Args:
        library: path of the file of Monarch's library, which is loaded.
        version: version of Monarch; empty if it is not known.
        warn: called at most once, possibly from another thread and some seconds later, with a line for the log if the
            guard is off: Monarch's version, the reason, and what it means.
    """
    global _called
    if _called:
        return
    _called = True

    def off(reason: Exception) -> None:
        warn(
            f"the guard of Monarch's sockets is off (Monarch {version or 'of unknown version'}): {reason}. Other users "
            "of this machine might connect to Monarch and run code here"
        )

    def prove() -> None:
        try:
            prove_guard()
        except GuardOff as error:
            undo()
            off(error)

    try:
        undo = install(library)
    except ImportsUnknown as error:
        off(error)
        return
    if version.partition("+")[0] not in TESTED:
        threading.Thread(target=prove, name="monarch-guard-proof", daemon=True).start()


def install(library: str) -> Callable[[], None]:
    """Have a loaded library reject connections over unix sockets from users other than this one and root.

    A rejected peer reads the end of the connection. The library gets ECONNABORTED, as if the peer had closed the
    connection before it was accepted. Sockets of other families are not affected.

    Returns:
        A function that undoes it.

    Raises:
        ImportsUnknown: the library cannot be changed; the message says why.
    """
    return redirect(library, {name: _replacement(name) for name in _FUNCTIONS})


def prove_guard() -> None:
    """Connect to this process's abstract sockets, and check that the guard sees the connections.

    The sockets that Monarch opens first stand for those that it opens later.

    Raises:
        GuardOff: a connection failed or was not seen, or no socket was opened in time.
    """
    deadline = time.monotonic() + _SOCKET_TIMEOUT
    while not (names := abstract_sockets()):
        if time.monotonic() > deadline:
            raise GuardOff(
                f"it is not tested with this version, and had no socket to be tried on within {_SOCKET_TIMEOUT:g} s"
            )
        time.sleep(0.05)
    for name in names:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PROOF_TIMEOUT)
            connection.bind("")  # the kernel chooses a name
            seen = _proofs[connection.getsockname()] = threading.Event()
            try:
                connection.connect(b"\0" + name)
                if not seen.wait(_PROOF_TIMEOUT):
                    raise GuardOff("it is not tested with this version, and did not see a connection that it tried")
            except OSError as error:
                raise GuardOff(f"it is not tested with this version, and could not be tried: {error}") from error
            finally:
                del _proofs[connection.getsockname()]


def abstract_sockets() -> set[bytes]:
    """Return the names, without the leading NUL, of the abstract unix sockets on which this process listens."""
    inodes = set()
    for descriptor in os.listdir(b"/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(b"/proc/self/fd/" + descriptor))
    with open("/proc/net/unix", "rb") as table:
        rows = [line.split() for line in table]
    # Columns: Num RefCount Protocol Flags Type St Inode Path. The flag is the kernel's __SO_ACCEPTCON.
    return {
        row[7][1:]
        for row in rows
        if len(row) > 7 and row[7].startswith(b"@") and row[3] == b"00010000" and b"socket:[%s]" % row[6] in inodes
    }


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
            if _proofs and (seen := _proofs.get(peer.getpeername())):
                seen.set()
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return _CREDENTIALS.unpack(credentials)[1] in (ours, 0)
        finally:
            peer.detach()
    except Exception:  # the caller is C code: nothing could handle an exception
        return False


# 64-bit relocations that become the address of a symbol: in data, in the GOT, and in the PLT's part of the GOT.

# Tags of a library's dynamic section (elf.h), then the layouts of Elf64_Rela and Elf64_Sym.
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ = 0, 2, 5, 6, 7, 8
_DT_JMPREL, _DT_RELACOUNT = 23, 0x6FFFFFF9
_RELA, _SYM = struct.Struct("=QQq"), struct.Struct("=IBBHQQ")


_PROT_READ, _PROT_WRITE = mmap.PROT_READ, mmap.PROT_WRITE


class ImportsUnknown(Exception):
    """The imports of the library cannot be found or replaced; the message says why."""


class _LinkMap(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_size_t),
    ]


def redirect(library: str, functions: Mapping[str, int]) -> Callable[[], None]:
    """Have a loaded library call other functions than those that it imports.

    Args:
        library: path of the library's file.
        functions: address of the C function to call instead, by the name of the imported function.

    Returns:
        A function that undoes the change.

    Raises:
        ImportsUnknown: the library imports none of the functions, or its imports cannot be found or written; it is
            unchanged then.
    """
    written: list[tuple[int, int]] = []

    def undo() -> None:
        while written:
            _write(*written.pop())

    try:
        found = list(entries(library, tuple(functions)))
        if not found:
            raise ImportsUnknown(f"{library} calls none of {', '.join(functions)} by a name that can be led elsewhere")
        for name, entry in found:
            before = ctypes.c_size_t.from_address(entry).value
            _write(entry, functions[name])
            written.append((entry, before))
    except (OSError, AttributeError, MemoryError, struct.error) as error:
        undo()
        raise ImportsUnknown(f"{library}: {error}") from error
    return undo


def entries(library: str, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Find the GOT entries of a loaded library that hold the addresses of imported functions.

    Yields:
        The name of a function and the address of an entry for it.

    Raises:
        ImportsUnknown: this machine architecture is not supported.
        OSError: the library is not loaded.
    """
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
