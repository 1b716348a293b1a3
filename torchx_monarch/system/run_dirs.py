# SPDX-License-Identifier: BSD-3-Clause
"""Make and remove folders that only their owner may enter, some of them for sockets, whose paths must be short."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from typing import TypeAlias

RUN_PREFIX = "tm-run-"
"""Prefix of the name of a folder for sockets that is not inside an app's folder."""

MAX_RUN_DIR = 71
"""The maximum path length, in bytes, of a folder for sockets. A socket's path has at most 107 bytes, and Monarch makes
sockets about three folders deeper: `hXXXXXXXX/NN/.tmpXXXXXX/XXXXXXXXXXX`."""


def new_run_dir() -> str:
    """Make a folder for sockets in TMPDIR, or in /tmp if TMPDIR is too long for a socket or not writable.

    (``tempfile`` does the same, at several times the cost of the rest of the supervisor's imports.)
    """
    name = f"{RUN_PREFIX}{os.urandom(8).hex()}"
    path = os.path.join(os.path.abspath(os.environ.get("TMPDIR") or "/tmp"), name)
    if len(os.fsencode(path)) <= MAX_RUN_DIR:
        with contextlib.suppress(OSError):  # TMPDIR does not exist or is not writable
            os.mkdir(path, 0o700)
            return path
    os.mkdir(path := f"/tmp/{name}", 0o700)
    return path


def private_dir(within: str) -> str:
    """Make a folder in another for the sockets and keys of one start of one replica; return its path.

    Its name is short, because a socket's path has at most 107 bytes.
    """
    import tempfile

    try:
        return tempfile.mkdtemp(prefix="h", dir=within)
    except OSError as error:
        raise ValueError(f"cannot make sockets in {within}: {error.strerror}") from None


_MEMORY = "/dev/shm"
_MEMORY_PREFIX = "tm-memory-"


MemoryDir: TypeAlias = tuple[str, int]
"""The path of a folder in memory, and the descriptor that locks it."""


def new_memory_dir(name: str) -> MemoryDir:
    """Make a folder in memory, or as ``new_run_dir`` where /dev/shm is missing; return its path with its lock.

    The memory of processes that were killed is freed first: nothing else does it, and their locks are gone.
    """
    remove_left_memory()
    shown = re.sub(r"[^\w.-]", "_", name)[-40:]
    while True:
        if os.access(_MEMORY, os.W_OK):
            os.mkdir(path := os.path.join(_MEMORY, f"{_MEMORY_PREFIX}{shown}-{os.urandom(8).hex()}"), 0o700)
        else:
            path = new_run_dir()
        with contextlib.suppress(FileNotFoundError):  # another process has found it before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, descriptor
            os.close(descriptor)


def remove_left_memory() -> None:
    """Remove the folders of ``new_memory_dir`` in memory whose owners have ended."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(_MEMORY) if name.startswith(_MEMORY_PREFIX)]
    for name in names:
        with contextlib.suppress(OSError):  # of another user, or in use
            path = os.path.join(_MEMORY, name)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(path)
            finally:
                os.close(descriptor)


def remove_tree(path: str) -> None:
    """Remove a folder with its content, as far as possible, or the file that a rank has put in its place."""
    import shutil  # it imports more than everything else that a task or a supervisor needs at its start

    try:
        os.unlink(path)  # rmtree opens its argument, which never returns for a FIFO
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
