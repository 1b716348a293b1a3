# SPDX-License-Identifier: BSD-3-Clause
"""Read and write torchelastic error files, to which a failed program may have written anything.

Of the JSON that torch's ``ErrorHandler`` and this package's hosts write, ``read`` keeps the fields that this package
uses, if they have the expected type, and cuts them to a maximum length. It drops everything else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable
from typing import Any

from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import printable

MESSAGE_BYTES = 8 * 1024
"""The maximum size of a message, in bytes of JSON."""

TRACEBACK_BYTES = 64 * 1024
"""The maximum size of a traceback, in bytes of JSON. Of a longer one, frames of libraries and the ends of long texts of
exceptions are left out first; of what remains, the end is kept."""

RESERVE_BYTES = 16 * 1024
"""The size in bytes of the reserve file beside an error file: ``error.json.reserve`` beside ``error.json``."""

_LIBRARY = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3[.\d]*/|(?=<frozen )")


class UnreadableError(ValueError):
    """Raised when an error file exists but cannot be used; the message gives the reason."""


def read(path: str, traceback_bytes: int = TRACEBACK_BYTES) -> dict[str, Any] | None:
    """Read the known fields of an error file (``known_fields``); return None if there is no such file."""
    try:
        data = safe_files.read_json(path)
    except FileNotFoundError:
        return None
    except safe_files.UnsafeFileError as error:
        raise UnreadableError(f"it {error.strerror}") from None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from None
    except ValueError:
        raise UnreadableError("it is not JSON") from None
    if not isinstance(data, dict):
        raise UnreadableError("it is not a JSON object")
    return known_fields(data, traceback_bytes)


def set_aside(path: str, restart: int) -> None:
    """Move the error file of an earlier start out of the way: before the first start remove it, then add a number.

    A time of the file would not show whose it is: the clock of a file server may be behind. Only a regular file is
    moved: a role may name a device.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            if restart:
                os.rename(path, f"{path}.{restart - 1}")
            else:
                os.unlink(path)


def make_reserve(path: str) -> None:
    """Make a reserve file beside an error file, so that the error can be written when the disk is full.

    Without room for a reserve, make none: it must not keep the job from running.
    """
    with contextlib.suppress(OSError):
        safe_files.make_reserve(f"{path}.reserve", RESERVE_BYTES)


def remove_reserve(path: str) -> None:
    """Remove the reserve file beside an error file, if it exists."""
    with contextlib.suppress(OSError):
        os.unlink(f"{path}.reserve")


def write(path: str, text: Callable[[int], str]) -> None:
    """Write an error file; on a full disk, write into its reserve file.

    ``text`` returns the content in at most the given number of bytes; 0 for no limit, and if the disk is not full.
    A device of that name stays what it is.
    """
    with contextlib.suppress(OSError):  # there is none
        if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK):
            return
    try:
        safe_files.replace_file(path, text(0).encode())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        safe_files.write_into_reserve(f"{path}.reserve", path, text(RESERVE_BYTES).encode())


def parse(text: str | None) -> dict[str, Any]:
    """Return the known fields (``known_fields``) of an error file's content; empty if it is None or no JSON object."""
    try:
        data = safe_files.parse_json(text or "null")
    except ValueError:
        return {}
    return known_fields(data) if isinstance(data, dict) else {}


def cleaned(text: str) -> str:
    """Reduce the content of an error file to its known fields; empty if it has none."""
    fields = parse(text)
    return json.dumps(fields) if fields else ""


def known_fields(data: dict[str, Any], traceback_bytes: int = TRACEBACK_BYTES) -> dict[str, Any]:
    """Return the known fields of an error file, nested as torch writes it or flat, where they have the right type.

    The traceback has at most ``traceback_bytes``, as JSON.
    """
    fields = _scalars(data)
    message = data.get("message")
    if not isinstance(message, dict):
        return fields
    fields["message"] = inner = _scalars(message)
    extra = message.get("extraInfo")
    if isinstance(extra, dict):
        inner["extraInfo"] = {**_scalars(extra)}
        callstack = extra.get("py_callstack")
        if isinstance(callstack, str):
            if len(callstack) > traceback_bytes:
                callstack = _shortened(callstack, traceback_bytes // 4)
            shown = printable(callstack[-traceback_bytes:])
            inner["extraInfo"]["py_callstack"] = _cut(shown, traceback_bytes, keeps_end=True)
    return fields


_SHORT = (
    "errorCode",
    "timestamp",
    "raised_at",
    "began",
    "joined",
    "consequence",
    "replica",
    "log",
    "rank_restarts",
    "final",
    "restarts",
)


def _scalars(data: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in ("message", *_SHORT):
        value = data.get(name)
        if isinstance(value, str):
            fields[name] = _cut(printable(value[:MESSAGE_BYTES]), MESSAGE_BYTES)
        elif isinstance(value, bool) or isinstance(value, (int, float)) and abs(value) < 1e15 and math.isfinite(value):
            fields[name] = value
    return fields


def path_in_library(path: str) -> str:
    """Return the path of a file of Python or of an installed package, without that of its folder; empty for others."""
    found = _LIBRARY.match(path)
    return path[found.end() :] if found else ""


def _shortened(callstack: str, max_text: int) -> str:
    """Leave out frames of libraries that another frame follows, and the ends of long texts of exceptions."""
    lines, pending, room = list[str](), list[str](), max_text
    for line in callstack.splitlines(keepends=True):
        is_frame = line.lstrip(" |").startswith('File "')
        if is_frame:
            room = max_text
            if pending:
                lines += ["  ...\n"] if lines[-1:] != ["  ...\n"] else []
                pending = []
        if is_frame and path_in_library(line.split('"')[1]):
            pending = [line]
        elif pending and line.startswith("    "):
            pending.append(line)
        else:
            if len(line) > room:
                line = f"{line[:room]}...\n" if room else ""
            room -= min(room, len(line))
            lines += [*pending, line]
            pending = []
    return "".join([*lines, *pending])


def _cut(text: str, limit: int, *, keeps_end: bool = False) -> str:
    """Return the beginning or the end of a text that fits into a number of bytes of JSON."""
    while (over := len(json.dumps(text)) - limit) > 0:
        removed = max(1, over // 12)  # JSON escapes an emoji to twelve
        text = text[removed:] if keeps_end else text[:-removed]
    return text


def write_for_caller(cause: str) -> None:
    """Write a root cause, if it is known, to the error file of this process's caller, if it has named one.

    So does torchrun, whose ``main`` is decorated with ``@record`` (``ErrorHandler.dump_error_file``, torch 2.13).
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and cause:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO may have no reader
        # After an error, the exit code and the summary still report the failure.
        with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "wb") as file:
            file.write(cause.encode())
