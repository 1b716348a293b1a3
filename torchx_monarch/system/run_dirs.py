# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""New folders that only their owner may enter, among them those for sockets, whose paths must be short."""

from __future__ import annotations

import contextlib
import os

RUN_PREFIX = "tm-run-"
"""What the name of a folder for sockets begins with where it does not lie in an app's own."""

MAX_RUN_DIR = 74
"""Longest path, in bytes, of the folder for sockets: a socket's own path has at most 107, and Monarch makes some two
folders deeper, `hXXXXXXXX/.tmpXXXXXX/XXXXXXXXXXX`."""


def new_dir(prefix: str) -> str:
    """Make a folder that only its owner may enter, named by the prefix and a random word; its path.

    (``tempfile`` does the same, at several times the cost of the rest of the supervisor's imports.)

    Raises:
        OSError: it cannot be made.
    """
    path = f"{prefix}{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def new_run_dir() -> str:
    """A new folder for sockets: in TMPDIR, or where that is too long for a socket or not ours to write to, in /tmp.

    Raises:
        OSError: no folder could be made.
    """
    base = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    random_word = 16
    if len(os.fsencode(os.path.join(base, RUN_PREFIX))) + random_word <= MAX_RUN_DIR:
        with contextlib.suppress(OSError):  # a TMPDIR that is not there, or not ours to write to
            return new_dir(os.path.join(base, RUN_PREFIX))
    return new_dir(os.path.join("/tmp", RUN_PREFIX))


def private_dir(within: str) -> str:
    """For sockets and keys: of this life of this replica alone, and short: a socket's path has at most 107 bytes.

    Raises:
        ValueError: it cannot be made.
    """
    import tempfile

    try:
        return tempfile.mkdtemp(prefix="h", dir=within)
    except OSError as error:
        raise ValueError(f"cannot make sockets in {within}: {error.strerror}") from None
