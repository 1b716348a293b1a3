# SPDX-License-Identifier: BSD-3-Clause
"""Have ranks end without taking each operator of torch's out of its dispatcher first: all of it ends with the process.

``zygote_main`` runs this file: it imports the standard library alone. Of the 4,600 functions that glibc calls when a
process ends that has imported torch 2.13, 3,381 are the destructor of one class, ``torch::detail::TorchLibraryInit``,
which deregisters operators, and one is the dispatcher's. They change nothing but memory, 7,000 pages of which a fork
must copy first. All other functions are called, in their order.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import os
import struct

_DISPATCHER = "_ZN3c1010DispatcherD1Ev"

_FREE, _CXA, _KINDS = 0, 4, range(5)
"""Kinds of functions in glibc's list: one that is not called, one that ``__cxa_atexit`` has added, and all kinds."""

_FUNCTIONS = 32
_BLOCK = struct.Struct(f"{2 + 4 * _FUNCTIONS}Q")
"""``struct exit_function_list`` of glibc's stdlib/exit.h: the next block, the number of functions, and of each of them
its kind, its mangled address, its argument and its library."""


def leave_operators() -> int:
    """Remove these destructors from what this process and its forks call when they end; return how many.

    The list is private to glibc. So it is found by a function that is added to it, and changed only if all that is in
    it is as expected, the dispatcher's destructor included. Return 0 elsewhere, such as without torch, with another C
    library or processor, or under a sanitizer, which calls such functions itself.
    """
    libc, memory = ctypes.CDLL(None), _Memory()
    try:
        torch = ctypes.CDLL(memory.paths["libtorch_cpu.so"], mode=os.RTLD_NOLOAD)
        exported = torch[_DISPATCHER], libc.gnu_get_libc_version
    except (KeyError, OSError, AttributeError):
        return 0
    dispatcher, harmless = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in exported)
    mark = ctypes.create_string_buffer(8)
    libc.__cxa_atexit(ctypes.c_void_p(harmless), mark, mark)
    functions = _functions(_Memory(), harmless, ctypes.addressof(mark))
    libraries = [library for _, address, library in functions if address == dispatcher]
    own = [(place, address) for place, address, library in functions if [library] == libraries]
    [(operators, number)] = collections.Counter(address for _, address in own).most_common(1) or [(0, 0)]
    if number <= len(own) / 2:
        return 0
    for place, address in own:
        if address in (operators, dispatcher):
            ctypes.c_long.from_address(place).value = _FREE
    return number


class _Memory:
    """The memory of this process that is mapped when this is made; ``paths`` are the mapped files, by their names."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self._mapped: list[tuple[int, int, str, str]] = []
        with open("/proc/self/maps") as file:
            for line in file:
                addresses, access, _, _, _, *path = line.rstrip("\n").split(None, 5)
                first, end = (int(address, 16) for address in addresses.split("-"))
                self._mapped.append((first, end, access[:3], "".join(path)))
                self.paths.update({os.path.basename(name): name for name in path})

    def is_mapped(self, access: str, address: int, size: int = 1) -> bool:
        _, end, found, _ = self._around(address)
        return found == access and address + size <= end

    def words(self, function: int) -> set[int]:
        """Return the words in the variables of a function's library: in its file's pages and those that follow."""
        library, last, found = self._around(function)[3], 0, set[int]()
        for first, end, access, path in self._mapped:
            if access == "rw-" and (path == library or (not path and first == last)):
                last = end
                found.update(word for (word,) in struct.iter_unpack("Q", ctypes.string_at(first, end - first)))
        return found

    def _around(self, address: int) -> tuple[int, int, str, str]:
        return self._mapped[bisect.bisect(self._mapped, (address + 1,)) - 1]


def _functions(memory: _Memory, newest: int, mark: int) -> list[tuple[int, int, int]]:
    """Return place, address and library of what ``__cxa_atexit`` has added; none if anything is not as expected.

    The newest function, whose argument and library are ``mark``, tells where the list is and how addresses are mangled.
    """
    for block in memory.words(newest):
        key, functions = None, list[tuple[int, int, int]]()
        while block % 8 == 0 and memory.is_mapped("rw-", block, _BLOCK.size):
            following, number, *words = _BLOCK.unpack(ctypes.string_at(block, _BLOCK.size))
            if number > _FUNCTIONS:
                break
            if key is None:
                if words[4 * number - 2 : 4 * number] != [mark, mark]:
                    break
                key = _rotated(words[4 * number - 3]) ^ newest
            for index in range(number):
                kind, mangled, _, library = words[4 * index : 4 * index + 4]
                address = _rotated(mangled) ^ key
                if kind not in _KINDS or (kind == _CXA and not memory.is_mapped("r-x", address)):
                    return []
                if kind == _CXA:
                    functions.append((block + 16 + 32 * index, address, library))
            if not following:
                return functions
            block = following
    return []


def _rotated(word: int) -> int:
    """Do as PTR_DEMANGLE of glibc's sysdeps/unix/sysv/linux/x86_64."""
    return (word >> 17 | word << 47) & (1 << 64) - 1
