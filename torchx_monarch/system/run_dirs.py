# SPDX-License-Identifier: BSD-3-Clause
"""Make and remove folders that only their owner may enter, some of them for sockets, whose paths must be short."""

from __future__ import annotations

import contextlib
import os

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


def remove_tree(path: str) -> None:
    """Remove a folder with its content, as far as possible, or the file that a rank has put in its place."""
    import shutil  # it imports more than everything else that a task or a supervisor needs at its start

    try:
        os.unlink(path)  # rmtree opens its argument, which never returns for a FIFO
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
