# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out what forbids that ranks are forks of an interpreter: what a fork does not get, or must not share.

``zygote_main`` runs this file: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable


class Resources:
    """The threads, open descriptors and children of this process at present.

    Args:
        fork: forks this process.
    """

    def __init__(self, fork: Callable[[], int]) -> None:
        self._fork = fork
        self._threads = set(os.listdir("/proc/self/task"))
        self._descriptors = _descriptors()
        self._children = _children()

    def tracer(self) -> str:
        """Return why a tracer or profiler, which would count the ranks as one process, forbids forks; else empty."""
        traced = sys.gettrace() or sys.getprofile() or threading.gettrace() or threading.getprofile()
        monitoring = getattr(sys, "monitoring", None)
        if traced or (monitoring and any(monitoring.get_tool(number) for number in range(6))):
            return "a tracer or profiler is active in their interpreter"
        return ""

    def what_is_new(self, module: str) -> str:
        """Return what the import of a module has added that forbids forks; empty if nothing."""
        now = Resources(self._fork)
        if why := now.tracer():
            return f"{why} since the import of {module}"
        if named := [one.name for one in threading.enumerate() if one is not threading.main_thread()]:
            return f"{module} runs a thread ({named[0]})"
        if now._threads > self._threads:
            # numpy's OpenBLAS, for one, ends its threads before every fork and starts them again when it needs them.
            self._fork_once()
            now._threads &= set(os.listdir("/proc/self/task"))
        for thread in now._threads - self._threads:
            return f"{module} runs a thread ({_read(f'/proc/self/task/{thread}/comm')})"
        for number in now._descriptors.keys() - self._descriptors.keys():
            return f"{module} keeps {now._descriptors[number]} open"
        for child in now._children - self._children:
            return f"{module} runs a process ({_read(f'/proc/{child}/comm')})"
        return ""

    def _fork_once(self) -> None:
        child = self._fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return {number: path for number, path in found.items() if path not in ("/dev/null", "/dev/urandom", "/dev/random")}


def _children() -> set[str]:
    return set(_read(f"/proc/self/task/{os.getpid()}/children").split())


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""
