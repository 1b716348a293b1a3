# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reading logs: whole, from and to a time, filtered, or followed until the app has ended."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from torchx_monarch.backends.local import log_writer
from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import LineReader

#: Seconds between two looks at a log that is followed.
_POLL = 0.05
#: Looks at the log for one look at the app's state, which costs more.
_LOOKS_PER_STATE = 4

_MAX_INDEX = 256 * 1024 * 1024
"""The most bytes that are read of an index: the times of weeks."""


class _Index:
    """The index of times beside a log."""

    def __init__(self, log_dir: str, stream: str, below: str | None) -> None:
        self._path = os.path.join(log_dir, log_writer.index_name(stream))
        self._below = below

    def offset(self, when: float) -> int | None:
        """Where the first line written at or after ``when`` starts; None when there is none yet."""
        try:
            data = safe_files.read_file(self._path, limit=_MAX_INDEX, below=self._below)
        except OSError:
            return None
        whole = len(data) - len(data) % log_writer.RECORD.size
        records = list(log_writer.RECORD.iter_unpack(data[:whole]))
        found = bisect.bisect_left([moment for _, moment in records], when)
        return int(records[found][0]) if found < len(records) else None


def lines(
    log_dir: str,
    stream: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    ended: Callable[[], bool],
    follow: bool = False,
    below: str | None = None,
) -> Iterator[str]:
    """The lines of one log, each with its line end. Bytes that are no UTF-8 are replaced.

    A line longer than ``line_output.LONGEST_READ`` comes in several. While a log is followed, what a carriage return
    begins comes as it stands, without a line end: TorchX prints it in the place of what was there before.

    Args:
        stream: stdout, stderr or combined.
        since: leave out lines written before; a time without zone is local time.
        until: leave out lines written at this time or later.
        ended: whether the app has ended; it may be slow.
        follow: wait for more until the app has ended (or ``until`` has passed).
        below: a folder of the caller's from which on no link is followed (``safe_files.open_file``). A log that is
            refused is one line that says why.
    """
    index = _Index(log_dir, stream, below)
    path = os.path.join(log_dir, log_writer.log_name(stream))
    start = 0 if since is None else None
    reader = LineReader()
    looks = 0
    while True:
        # The order matters: what was written before the end is read after it is known.
        last = not follow or (looks % _LOOKS_PER_STATE == 0 and ended())
        last = last or (until is not None and time.time() > until.timestamp() + 2 * log_writer.RESOLUTION)
        looks += 1
        if start is None and since is not None:
            start = index.offset(since.timestamp())
        limit = index.offset(until.timestamp()) if until is not None else None
        if start is not None:
            for data in _chunks(path, start, limit, below):
                start += len(data)
                for line in reader.feed(data):
                    yield line.decode(errors="replace")
        if last or (limit is not None and start is not None and start >= limit):
            if rest := reader.rest():
                yield rest.decode(errors="replace")
            return
        if drawn := reader.drawn():
            yield drawn.decode(errors="replace")
        time.sleep(_POLL)


def _chunks(path: str, start: int, limit: int | None, below: str | None) -> Iterator[bytes]:
    try:
        fd = safe_files.open_file(path, below=below)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if start == 0:
            yield f"[monarch] this log cannot be read: {error}\n".encode(errors="backslashreplace")
        return
    with open(fd, "rb") as file:
        file.seek(min(start, os.fstat(fd).st_size))  # an index may be damaged
        while True:
            size = log_writer.CHUNK if limit is None else min(log_writer.CHUNK, limit - file.tell())
            data = file.read(size) if size > 0 else b""
            if not data:
                return
            yield data
