# SPDX-License-Identifier: BSD-3-Clause
"""Name the calls with which the event loop of a host may wait for a disk, while other hosts wait for its heartbeats."""

from __future__ import annotations

import asyncio
import os
import stat as modes
import sys
import threading
from collections.abc import Callable
from typing import Any

VARIABLE = "TORCHX_MONARCH_TEST_LOOP"
"""Names the file into which a host of a test writes these calls."""

FILE = "waits"
"""Its name, in the folder of a test's hosts."""

_CHANGES = ("chmod", "link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate", "utime")
_AUDITED = ("open", "os.listdir", "os.scandir", *(f"os.{name}" for name in _CHANGES))
"""The events of ``sys.addaudithook`` whose first argument is a path."""

_NOT_AUDITED = ("access", "lstat", "mkfifo", "stat", "write")

_IN_MEMORY = ("/proc", "/sys", "/dev", "/memfd:")

_SOURCES = ("importlib", "linecache")
"""Modules that read this package."""

_ALLOWED = ("start_command", "announce")
"""Functions that start a program, whose file is read meanwhile, or that remove the file of a socket."""


def install(path: str, run_dir: str) -> None:
    """Write the calls of this process, a host, into a file, while it has leases."""
    from torchx_monarch.host.host_process import HostProcess
    from torchx_monarch.transport.lease import Leases

    main, is_watched = threading.main_thread(), False

    def check(name: str, subject: Any) -> None:
        nonlocal is_watched
        if not is_watched or threading.current_thread() is not main or asyncio._get_running_loop() is None:
            return
        if isinstance(subject, int):
            if name != "write" or not modes.S_ISREG(os.fstat(subject).st_mode):
                return
            subject = os.readlink(f"/proc/self/fd/{subject}")
        where = os.path.join(os.getcwd(), os.fsdecode(subject))
        folder = os.path.dirname(where)
        # Sockets, and what is beside them, are on a local disk.
        if where.startswith(_IN_MEMORY) or run_dir in (folder, os.path.dirname(folder)):
            return
        callers, frame = list[str](), sys._getframe(2)
        while frame is not None and len(callers) < 12:
            code = frame.f_code
            if any(name in code.co_filename for name in _SOURCES) or code.co_name in _ALLOWED:
                return
            callers.append(f"{code.co_name} ({code.co_filename}:{frame.f_lineno})")
            frame = frame.f_back  # type: ignore[assignment]
        is_watched = False
        with open(path, "a") as report:
            report.write(f"{name} {where}: {' < '.join(callers)}\n")
        is_watched = True

    def watch(function: Callable[..., Any], value: bool) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            nonlocal is_watched
            is_watched = value
            return function(*args)

        return watched

    def checked(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
        def call(subject: Any, *args: Any, **more: Any) -> Any:
            check(name, subject)
            return called(subject, *args, **more)

        return call

    for name in _NOT_AUDITED:
        setattr(os, name, checked(name, getattr(os, name)))
    sys.addaudithook(lambda event, args: check(event, args[0]) if event in _AUDITED else None)
    setattr(Leases, "start", watch(Leases.start, True))  # noqa: B010
    setattr(HostProcess, "_report_and_exit", watch(HostProcess._report_and_exit, False))  # noqa: B010
