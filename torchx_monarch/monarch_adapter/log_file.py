# SPDX-License-Identifier: BSD-3-Clause
"""Close Monarch's log file where another user may have planted it.

``model.env_names.keep_monarch_log_private`` keeps Monarch from opening the file, which it does when it is imported.
This is for a program that has imported Monarch before.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Callable

from torchx_monarch.system import safe_files


def close_unsafe(say: Callable[[str], None]) -> None:
    """Have Monarch write no more to its log file if another user may have planted the file or its folder.

    Args:
        say: called with a line that names the file, if there is one.
    """
    if "monarch._rust_bindings" not in sys.modules:
        return
    try:
        folder = os.path.join("/tmp", pwd.getpwuid(os.geteuid()).pw_name)
        suffix = os.environ.get("MONARCH_LOG_SUFFIX")
        path = os.path.join(folder, f"monarch_log_{suffix}.log" if suffix else "monarch_log.log")
        log = os.stat(path)
    except (KeyError, OSError):
        return
    descriptors = [fd for fd, found in _descriptors() if os.path.samestat(found, log)]
    problem = _problem(folder, path)
    if not descriptors or not problem:
        return
    if len(descriptors) == 1:  # else the program itself has opened the file to which a link leads
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, descriptors[0], inheritable=False)
        os.close(null)
    say(
        f"Monarch was imported before torchx_monarch and has opened its log {path}: {problem}. Import torchx_monarch "
        "first, which keeps Monarch from writing there (docs/explanation/security.md, Files)"
    )


def _descriptors() -> list[tuple[int, os.stat_result]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.fstat(int(name))))
        except OSError:  # that of the folder, or one that another thread has closed
            continue
    return found


def _problem(folder: str, path: str) -> str:
    """Return why other users may have planted a file, whose name follows; empty if they cannot have."""
    if os.path.islink(folder):
        return f"{folder} is a symbolic link"
    try:
        os.close(safe_files.open_file(path, below=folder))
        mode = os.stat(folder).st_mode
    except OSError as error:
        return str(error)
    return f"{folder} can be written to by other users" if mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
