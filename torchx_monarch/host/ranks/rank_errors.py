# SPDX-License-Identifier: BSD-3-Clause
"""Write the torchelastic error file of a rank whose program failed.

``rank_main`` runs this file in the process of the failed rank: it imports the standard library alone.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

_MAX_BYTES = 1 << 20
"""Size of an error file that the host still reads (``safe_files.MAX_JSON_BYTES``)."""

_MAX_TEXT = 8192
"""Characters of an exception's text, of which the first are kept."""

_MAX_CALLSTACK = _MAX_BYTES // 16
"""Characters of a traceback, of which the last are kept. JSON can use twelve bytes for each, of an emoji."""

_NO_SPACE = ("No space left", "Disk quota", "iostream error")
"""What errors of a full disk say, that of ``torch.save`` last (torch 2.13)."""

_MAX_FIRST = 500
"""Characters of the text of the first exception of a chain."""

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11

_MAX_PATHS = 100
"""Paths in the variables of a failed program whose disks are looked at."""


def record(error: BaseException, began: bool) -> None:
    """Write the torchelastic error file, unless the program (``@record``) has written one that the host can read.

    Beside torch's keys, ``extraInfo`` has ``raised_at``, seconds since the epoch with a fraction; ``began``; and, if
    ``init_process_group`` failed, ``joined``: whether the process had been in a process group before.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    with contextlib.suppress(OSError):
        if 0 < os.path.getsize(path) <= _MAX_BYTES:
            return
        os.unlink(path)  # it is empty if the disk was full when @record wrote it
    not_started = not began and isinstance(error, SystemExit)
    # One part of the traceback is a frame or the text of an exception.
    parts = [] if not_started else traceback.format_exception(type(error), error, error.__traceback__)
    callstack = "".join(part if len(part) <= _MAX_TEXT else f"{part[:_MAX_TEXT]}...\n" for part in parts)
    try:
        message = _why_not_started(error) if not_started else _describe(error)[:_MAX_TEXT]
    except Exception:
        message = f"{type(error).__name__}: <exception str() failed>"
    with contextlib.suppress(Exception):  # an exception of the chain may have a str() that fails
        message += "" if not_started else _reasons(error)
    extra = {
        "py_callstack": callstack[-_MAX_CALLSTACK:],
        "timestamp": str(int(time.time())),
        "raised_at": time.time(),
        "began": began,
    }
    joined = _joined(error)
    if joined is not None:
        extra["joined"] = joined
    data = {"message": {"message": message, "extraInfo": extra}}
    with contextlib.suppress(OSError):  # a full disk must not hide the program's error
        with open(path + ".tmp", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(data, file)
        os.replace(path + ".tmp", path)


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


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _chain(error: BaseException, with_hidden: bool = False) -> Iterator[BaseException]:
    """Yield the exceptions of a traceback, the last one first, if wanted with those that ``from None`` hides.

    Of an exception group, such as that of an asyncio.TaskGroup, the first exception follows.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        first = link.exceptions[0] if isinstance(link, _GROUPS) else None
        link = link.__cause__ or (link.__context__ if with_hidden or not link.__suppress_context__ else None) or first


def _reasons(error: BaseException) -> str:
    """Return in parentheses what explains an exception beside its own message; empty if nothing does.

    That is the first exception of its chain, the disk that is full, and that ranks have no stdin.
    """
    chain = list(_chain(error))
    described = [_describe(link) for link in chain]
    found = [f"after {described[-1][:_MAX_FIRST]}"] if described[-1] != described[0] and str(chain[-1]) else []
    if any(words in text for words in _NO_SPACE for text in described) and (disk := _fullest_disk(chain)):
        found.append(disk)
    if described[0] == "EOFError: EOF when reading a line":  # of input()
        found.append("a job has no stdin")
    return f" ({'; '.join(found)})" if found else ""


def _fullest_disk(chain: Sequence[BaseException]) -> str:
    """Return which of the disks that the variables of failed functions name has the least space, and how much it has.

    The paths are strings, path objects and the names of open files, those of the innermost functions first.
    """
    frames = [frame for link in chain for frame, _ in reversed([*traceback.walk_tb(link.__traceback__)])]
    values = [value for frame in frames for value in frame.f_locals.values()]
    named = [getattr(value, "name", "") if isinstance(value, io.IOBase) else value for value in values]
    paths = [os.path.abspath(os.fsdecode(name)[:_MAX_TEXT]) for name in named if isinstance(name, (str, os.PathLike))]
    free: dict[str, int] = {}
    for path in dict.fromkeys([os.getcwd(), *map(os.path.dirname, paths[:_MAX_PATHS])]):
        with contextlib.suppress(OSError, ValueError):
            found = os.statvfs(path)
            if found.f_blocks and not found.f_flag & os.ST_RDONLY:
                while not os.path.ismount(path):
                    path = os.path.dirname(path)
                free[path] = found.f_bavail * found.f_frsize
    disk = min(free, key=lambda path: free[path], default="")
    return f"{disk} has {free[disk] >> 20} MiB free" if disk else ""


def _joined(error: BaseException) -> bool | None:
    """Return whether this process had been in a process group when ``init_process_group`` failed; None if it did not.

    The default group's init method and the exception hook reveal earlier groups: ``destroy_process_group`` does not
    reset these two.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return None
    for link in _chain(error, with_hidden=True):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_globals is vars(c10d) and frame.f_code.co_name == "init_process_group":
                hook = getattr(getattr(sys, "excepthook", None), "__qualname__", "")
                url = getattr(c10d, "_default_pg_init_method", None)
                return bool(c10d.is_initialized() or url or hook.startswith("init_process_group."))
    return None
