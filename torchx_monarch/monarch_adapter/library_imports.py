# SPDX-License-Identifier: BSD-3-Clause
"""Replace functions that a loaded library imports from other libraries, for the calls of this library only.

A library calls functions of other libraries through its GOT, a table of addresses. Its ELF relocations name the entries
of the GOT; this module writes other addresses into them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Iterator, Mapping

# 64-bit relocations that become the address of a symbol: in data, in the GOT, and in the PLT's part of the GOT.
_RELOCATIONS = {"x86_64": (1, 6, 7), "aarch64": (257, 1025, 1026)}

# Tags of a library's dynamic section (elf.h), then the layouts of Elf64_Rela and Elf64_Sym.
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ = 0, 2, 5, 6, 7, 8
_DT_JMPREL, _DT_RELACOUNT = 23, 0x6FFFFFF9
_RELA, _SYM = struct.Struct("=QQq"), struct.Struct("=IBBHQQ")

_RTLD_DI_LINKMAP = 2

_PROT_READ, _PROT_WRITE = mmap.PROT_READ, mmap.PROT_WRITE


class ImportsUnknown(Exception):
    """The imports of the library cannot be found or replaced; the message says why."""


class _LinkMap(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_size_t),
    ]


def redirect(library: str, functions: Mapping[str, int]) -> None:
    """Have a loaded library call other functions than those that it imports.

    Args:
        library: path of the library's file.
        functions: address of the C function to call instead, by the name of the imported function.

    Raises:
        ImportsUnknown: the library imports none of the functions, or its imports cannot be found or written.
    """
    try:
        found = list(entries(library, tuple(functions)))
        for name, entry in found:
            _write(entry, functions[name])
    except (OSError, AttributeError, MemoryError, struct.error) as error:
        raise ImportsUnknown(f"{library}: {error}") from error
    if not found:
        raise ImportsUnknown(f"{library} calls none of {', '.join(functions)} by a name that can be led elsewhere")


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
