# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The option ``-o FILE`` of sub-commands that write a file."""

from __future__ import annotations

import argparse
import contextlib
import os

from torchx_monarch.backends.core.errors import UserError


def add_output(parser: argparse.ArgumentParser) -> None:
    """Define ``-o``."""
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write")


def write_output(path: str, text: str) -> None:
    """Write a text aside, and give it the name of ``-o``.

    Raises:
        UserError: the file cannot be written, or something else has the name.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise UserError(f"cannot write {path}: it is no regular file")
    path = os.path.realpath(path)
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        # A surrogate stands for a byte of a file name that is no UTF-8 (os.fsdecode).
        with open(aside, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
