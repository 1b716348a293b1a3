# SPDX-License-Identifier: BSD-3-Clause
"""The option ``-o FILE`` of sub-commands that write a file."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys

from torchx_monarch.backends.core.errors import UserError

STDOUT = ("-", "/dev/stdout")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Define ``-o``."""
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write; - for stdout")


def write_output(path: str, text: str) -> None:
    """Write a text aside, and give it the name of ``-o`` and the permissions of the file that has this name.

    Raises:
        UserError: the file cannot be written, or something else has the name.
    """
    data = text.encode(errors="backslashreplace")  # a surrogate: a byte of a file name that is no UTF-8 (os.fsdecode)
    if path in STDOUT:
        sys.stdout.buffer.write(data)
        return
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"cannot write {path}: it is no regular file")
    path = os.path.realpath(path)
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else None
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with open(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)  # the umask has taken bits away
            file.write(data)
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
