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
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return os.write(fd, line) == len(line)
        finally:
            os.close(fd)
    except OSError:
        return False


def read(path: str | os.PathLike[str], offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the events written since ``offset``.

    Only whole lines are given, so a reader never sees half an event. A line that is not a JSON object (cut short by a
    full disk) is skipped. A file that is not there has no events yet.

    Returns:
        The events, oldest first, and the offset to pass the next time.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    events = []
    for line in data[:end].splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events, offset + end
