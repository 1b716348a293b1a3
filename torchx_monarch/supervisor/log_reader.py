# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read logs: whole, from and to a time, filtered, or followed until the app has ended."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from torchx_monarch.supervisor import log_writer
from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import LineReader

#: Seconds between two reads of a log that is followed.
_POLL = 0.05
#: Reads of the log for each check of the app's state, which costs more.
_READS_PER_CHECK = 4

_MAX_INDEX = 256 * 1024 * 1024
"""The maximum bytes read of an index: the times of weeks."""


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
    """Yield the lines of one log, each with its line end. Bytes that are not UTF-8 are replaced.

    A line longer than ``line_output.LONGEST_READ`` is split. While a log is followed, text after a carriage return is
    yielded as it stands, without a line end: TorchX prints it over the text before it.

    Args:
        log_dir: the folder of the replica's logs.
        stream: stdout, stderr or combined.
        since: leave out lines written before; a time without zone is local time. None for the beginning.
        until: leave out lines written at this time or later. None for the end.
        ended: returns whether the app has ended; it may be slow.
        follow: wait for more until the app has ended (or ``until`` has passed).
        below: a folder of the caller inside which no link is followed (``safe_files.open_file``). A log that is refused
            yields one line with the reason.
    """
    path, index = (os.path.join(log_dir, name(stream)) for name in (log_writer.log_name, log_writer.index_name))
    start = 0 if since is None else None
    reader = LineReader()
    passes = 0
    while True:
        # Check for the end before reading, so that text that was written just before the end is read, too.
        last = not follow or (passes % _READS_PER_CHECK == 0 and ended())
        last = last or (until is not None and time.time() > until.timestamp() + 2 * log_writer.RESOLUTION)
        passes += 1
        if start is None and since is not None:
            start = _offset(index, since, below)
        limit = None if until is None else _offset(index, until, below)
        if start is not None:
            for data in _chunks(path, start, limit, below):
                start += len(data)
                for line in reader.feed(data):
                    yield line.decode(errors="replace")
        if last or (limit is not None and start is not None and start >= limit):
            if rest := reader.rest():
                yield rest.decode(errors="replace")
            return
        if pending_progress := reader.pending_progress():
            yield pending_progress.decode(errors="replace")
        time.sleep(_POLL)


def _offset(index: str, when: datetime, below: str | None) -> int | None:
    """Return where the first line written at or after ``when`` starts; None if it is not written yet.

    Args:
        index: path of the index of times beside the log.
        when: the time.
        below: as for ``lines``.
    """
    try:
        data = safe_files.read_file(index, limit=_MAX_INDEX, below=below)
    except OSError:
        return None
    whole = len(data) - len(data) % log_writer.RECORD.size
    records = list(log_writer.RECORD.iter_unpack(data[:whole]))
    found = bisect.bisect_left([moment for _, moment in records], when.timestamp())
    return int(records[found][0]) if found < len(records) else None


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
        file.seek(min(start, os.fstat(fd).st_size))  # a damaged index may have an offset beyond the end
        while True:
            size = log_writer.CHUNK if limit is None else min(log_writer.CHUNK, limit - file.tell())
            data = file.read(size) if size > 0 else b""
            if not data:
                return
            yield data
