# SPDX-License-Identifier: BSD-3-Clause
"""The events of an app: an append-only file with one JSON object per line.

What an event says of each host or rank is in a file of its attempt beside it (``details``): events stay short, however
many ranks a job has.

Several processes append to one file (the supervisor, the hosts). Each event is one ``write`` to a descriptor opened
with ``O_APPEND``, so lines never mix on a local file system. Uses the standard library only: this module is imported
where start-up time counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import Any, cast

from torchx_monarch.model.codec import Seconds
from torchx_monarch.system import safe_files

Event = dict[str, Any]
"""Has at least ``time`` (seconds since the epoch), ``kind`` and ``message``, both str. ``seconds`` is a number or None,
``role`` a str or None, fields of ``_INTEGERS`` and ``_TIMES`` are numbers, those of ``_TEXTS`` str; further fields may
have any type."""

_INTEGERS = ("attempt", "code", "count", "details", "exit_code", "max_restarts", "rank", "replica", "run")
_TIMES = ("failed_at", "waited")
_TEXTS = ("fault", "node", "ranks", "reason", "unshared")
_DETAILS = ("hosts", "exits")

FILE = "events.jsonl"
"""The name of the file."""

_FOLDER = "attempts"
"""The folder of details, beside the file of the events."""

_PIECE = 1 << 26
"""Bytes that are read at once. No event is that long."""

_MAX_DETAILS = 1 << 23
"""Bytes of details from which on those of older attempts are left out: a thousand hosts with 8 ranks write 1.3 MB."""


@dataclasses.dataclass(frozen=True)
class HostStart:
    """What an event ``ranks`` says of a host: the processes of its ranks, and when it imported torch."""

    replica: int
    node: str = ""
    first_rank: int = 0
    pids: tuple[int | None, ...] = ()
    imported: tuple[Seconds, ...] = ()


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """What an event ``attempt_end`` says of a rank; its fields mean what they do in ``timeline.Span``."""

    rank: int
    code: int | None
    started: Seconds
    ended: Seconds
    secondary: bool = False
    grouped: Seconds | None = None


def append(
    path: str | os.PathLike[str], kind: str, message: str, /, *, seconds: float | None = None, **fields: object
) -> bool:
    """Append one event; return whether the whole of it was written, and never raise ``OSError``.

    Events inform people. Losing one (a full disk, a deleted folder) must not end a job.

    Args:
        seconds: duration of the phase that ends with this event; None for an event without a duration.
        fields: further values. A value that JSON cannot represent is written as its ``str``. With a number ``details``,
            ``hosts`` and ``exits`` are written to the file with this number.
    """
    if "details" in fields and (details := {name: fields.pop(name) for name in _DETAILS if name in fields}):
        beside = _details(path, cast(int, fields["details"]))
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(beside), mode=0o700, exist_ok=True)
        append(beside, kind, "", seconds=None, **details)
    event: dict[str, object] = {"time": time.time(), "kind": kind, "message": message}
    if seconds is not None:
        event["seconds"] = seconds
    event.update(fields)
    line = (json.dumps(event, default=str) + "\n").encode()
    try:
        fd = safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if (written := os.write(fd, line)) == len(line):
                return True
            os.ftruncate(fd, os.fstat(fd).st_size - written)  # the next event would be lost, too
            return False
        finally:
            os.close(fd)
    except OSError:
        return False


def read(
    path: str | os.PathLike[str], offset: int = 0, *, below: str | os.PathLike[str] | None = None
) -> tuple[list[Event], int]:
    """Read the events written since ``offset``, the oldest first; return them and the offset for the next call.

    Only whole lines are read, so a reader never sees half an event. A line that is not an event (cut short by a full
    disk, or written by the job's own program) is skipped. A file that does not exist or may not be read has no events
    yet.

    Args:
        below: a folder of the caller inside which no link is followed (``safe_files.open_file``); None for no check.
    """
    try:
        fd = safe_files.open_file(path, below=below)
    except OSError:
        return [], offset
    found, end = list[Event](), 1
    with open(fd, "rb") as file:
        while end:
            file.seek(offset)
            data = file.read(_PIECE)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == _PIECE:
                end = len(data)  # another program wrote the line
            found += parse(data[:end])
            offset += end
    return found, offset


def read_detailed(path: str | os.PathLike[str], *, below: str | os.PathLike[str] | None = None) -> list[Event]:
    """Read all events (``read``), those of the last attempts with their details."""
    happened, left = read(path, below=below)[0], _MAX_DETAILS
    details: dict[int, list[Event]] = {}
    for event in reversed(happened):
        number = event.get("details", -1)
        if number >= 0 and number not in details and left > 0:
            details[number], size = read(_details(path, number), below=below)
            left -= size
        for more in details.get(number, ()):
            if more["kind"] == event["kind"]:
                event.update({name: more[name] for name in _DETAILS if name in more})
    return happened


def _details(path: str | os.PathLike[str], number: int) -> str:
    return os.path.join(os.path.dirname(os.fspath(path)), _FOLDER, f"{number}.jsonl")


def last_sign_of_life(path: str | os.PathLike[str]) -> float:
    """Return when a process of a job has written an event, or set the time of the file, last; 0 if that is unknown."""
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def parse(data: bytes) -> list[Event]:
    """Return the events in whole lines of a file; a line that is not an event is skipped."""
    found = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            found.append(checked(safe_files.parse_json(line)))
    return [event for event in found if event is not None]


def checked(event: object) -> Event | None:
    """Return a value, which a rank may have written, without fields of a wrong type; None if it is not an event."""
    if not isinstance(event, dict):
        return None
    texts = (event.get("kind"), event.get("message"))
    sound = (
        all(isinstance(text, str) for text in texts)
        and _is_time(event.get("time"))
        and (event.get("seconds") is None or _is_time(event["seconds"]))
        and isinstance(event.get("role"), (str, type(None)))
    )
    if not sound:
        return None
    wrong = [name for name in _INTEGERS if type(event.get(name, 0)) is not int]
    wrong += [name for name in _TIMES if not _is_time(event.get(name, 0))]
    wrong += [name for name in _TEXTS if not isinstance(event.get(name, ""), str)]
    for name in wrong:
        del event[name]
    return event


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e11
