# SPDX-License-Identifier: BSD-3-Clause
"""Write the torchelastic error file of a rank whose program failed, even if the disk is full.

``rank_main`` runs this file in the process of the failed rank: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
import traceback
from typing import Any

_MAX_BYTES = 1 << 20
"""Size of an error file that the host still reads (``safe_files.MAX_JSON_BYTES``)."""

_MAX_TEXT = 8192
"""Characters of an exception's text, of which the first are kept."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def record(error: BaseException, began: bool) -> None:
    """Write the torchelastic error file, unless the program (``@record``) has written one that the host can read.

    Beside torch's keys, ``extraInfo`` has ``raised_at``, seconds since the epoch with a fraction; ``began``; if
    ``init_process_group`` failed, ``joined``: whether the process had been in a process group before; and
    ``disk_full``, if the file could only be written into its reserve.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    with contextlib.suppress(OSError):
        if 0 < os.path.getsize(path) <= _MAX_BYTES:  # an empty file: the disk was full when @record wrote it
            return
    error = _cause_of_unwritten(error)
    not_started = not began and isinstance(error, SystemExit)
    # One part of the traceback is a frame or the text of an exception.
    parts = [] if not_started else traceback.format_exception(type(error), error, error.__traceback__)
    callstack = "".join(part if len(part) <= _MAX_TEXT else f"{part[:_MAX_TEXT]}...\n" for part in parts)
    try:
        message = _why_not_started(error) if not_started else f"{type(error).__name__}: {error}"[:_MAX_TEXT]
    except Exception:
        message = f"{type(error).__name__}: <exception str() failed>"
    extra = {
        "py_callstack": callstack,
        "timestamp": str(int(time.time())),
        "raised_at": time.time(),
        "began": began,
    }
    joined = _joined(error)
    if joined is not None:
        extra["joined"] = joined
    data = {"message": {"message": message, "extraInfo": extra}}
    with contextlib.suppress(OSError):  # a full disk must not hide the program's error
        try:
            with open(path + ".tmp", "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(_fitting(data, _MAX_BYTES))
            os.replace(path + ".tmp", path)
        except OSError as failure:
            with contextlib.suppress(OSError):
                os.unlink(path + ".tmp")
            if failure.errno in _DISK_FULL:
                _write_into_reserve(path, data)


def _why_not_started(error: BaseException) -> str:
    """Return why Python could not start the program, as it says itself but for the interpreter's path."""
    origin = error.__context__
    while origin is not None and origin.__cause__ is not None:
        origin = origin.__cause__
    if isinstance(origin, ImportError):
        return str(origin)
    if isinstance(origin, OSError):
        return f"can't open file {origin.filename!r}: {origin.strerror}"
    return str(error).removeprefix(f"{sys.executable}: ")


def _write_into_reserve(path: str, data: dict[str, Any]) -> None:
    """Write the error into the reserve file that the host has made beside it.

    The host learns the reason, ``disk_full``, from the file: a moment later the reserves of other ranks are free again.
    """
    data["message"]["extraInfo"]["disk_full"] = True
    with open(path + ".reserve", "r+b") as file:
        file.write(_fitting(data, os.fstat(file.fileno()).st_size))
        file.truncate()
    os.replace(path + ".reserve", path)


def _fitting(data: dict[str, Any], room: int) -> bytes:
    """Return an error as JSON; shorten the traceback, from its beginning, and then the message to fit."""
    message, extra = data["message"], data["message"]["extraInfo"]
    while len(text := json.dumps(data).encode()) > room and (extra["py_callstack"] or message["message"]):
        callstack = extra["py_callstack"]
        extra["py_callstack"] = callstack[len(callstack) // 2 + 1 :]
        if not callstack:
            message["message"] = message["message"][: len(message["message"]) // 2]
    return text


def _cause_of_unwritten(error: BaseException) -> BaseException:
    """Return the program's exception if ``error`` says that ``@record`` could not write it to a full disk."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL and error.__context__ is not None:
        recorder = "torch.distributed.elastic.multiprocessing.errors.error_handler"
        if any(frame.f_globals.get("__name__") == recorder for frame, _ in traceback.walk_tb(error.__traceback__)):
            cause = error.__context__
            # Closing a text file that cannot be flushed raises twice; the first exception has no traceback.
            while cause.__traceback__ is None and cause.__context__ is not None:
                cause = cause.__context__
            return cause
    return error


def _joined(error: BaseException) -> bool | None:
    """Return whether this process had been in a process group when ``init_process_group`` failed; None if it did not.

    The default group's init method and the exception hook reveal earlier groups: ``destroy_process_group`` does not
    reset these two.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    seen: set[int] = set()
    link: BaseException | None = error
    while c10d is not None and link is not None and id(link) not in seen:
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_globals is vars(c10d) and frame.f_code.co_name == "init_process_group":
                hook = getattr(getattr(sys, "excepthook", None), "__qualname__", "")
                url = getattr(c10d, "_default_pg_init_method", None)
                return bool(c10d.is_initialized() or url or hook.startswith("init_process_group."))
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None
