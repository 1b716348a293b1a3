# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What happened when: an app's append-only list of events, one JSON object a line.

Several processes append to one file (the supervisor, the hosts). Each event is one ``write`` to a descriptor opened
with ``O_APPEND``, so lines never mix on a local file system. Standard library only: this is imported where start-up
time counts.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from torchx_monarch.system import safe_files

Event = dict[str, Any]
"""Has at least ``time`` (seconds since the epoch), ``kind`` and ``message``, both text; ``seconds`` is a number."""

MAX_READ = 64 * 1024 * 1024
"""The most bytes that ``read`` reads at a time."""


def append(
    path: str | os.PathLike[str], kind: str, message: str, *, seconds: float | None = None, **fields: object
) -> bool:
    """Append one event; never raises ``OSError``.

    An event tells a person what is going on. Losing one (a full disk, a folder that is gone) must not end a job.

    Args:
        path: the events file; created with mode 0600 if it is not there.
        kind: a short word for programs, such as ``"submitted"``.
        message: one line for people.
        seconds: how long what ended here has taken.
        fields: anything else that JSON can hold; other values are written as their ``str``.

    Returns:
        Whether the whole event is in the file.
    """
    event: dict[str, object] = {"time": time.time(), "kind": kind, "message": message}
    if seconds is not None:
        event["seconds"] = seconds
    event.update(fields)
    line = (json.dumps(event, default=str) + "\n").encode()
    try:
        fd = safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            return os.write(fd, line) == len(line)
        finally:
            os.close(fd)
    except OSError:
        return False


def read(path: str | os.PathLike[str], offset: int = 0) -> tuple[list[Event], int]:
    """Read the events written since ``offset``.

    Only whole lines are read, so a reader never sees half an event. A line that is no event (cut short by a full disk,
    written by a job into our file) is skipped. A file that is not there, or may not be read, has no events yet. Of a
    file that has grown by more than ``MAX_READ`` bytes the rest is left for the next call.

    Returns:
        The events, oldest first, and the offset to pass the next time.
    """
    try:
        fd = safe_files.open_file(path)
    except OSError:
        return [], offset
    with open(fd, "rb") as file:
        file.seek(offset)
        data = file.read(MAX_READ)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == MAX_READ:
        end = len(data)  # a line that no writer of ours has written
    found = (_event(line) for line in data[:end].splitlines())
    return [event for event in found if event is not None], offset + end


def _event(line: bytes) -> Event | None:
    """The event in a line; None where there is none."""
    try:
        event = safe_files.parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict):
        return None
    texts, times = (event.get("kind"), event.get("message")), (event.get("time"), event.get("seconds") or 0.0)
    sound = all(isinstance(text, str) for text in texts) and all(map(_is_time, times))
    return event if sound else None


def _is_time(value: object) -> bool:
    """Whether a value can be a number of seconds: neither NaN nor more than a float or a date can hold."""
    return isinstance(value, (int, float)) and abs(value) < 1e11
