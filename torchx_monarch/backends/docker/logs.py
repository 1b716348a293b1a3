# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of one container: whole, between two times, or followed through its restarts until the app ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from docker.errors import NotFound

from torchx_monarch.backends.core.backend import LogQuery
from torchx_monarch.backends.core.timed_line import TimedLine, seconds
from torchx_monarch.system.line_output import LineReader

if TYPE_CHECKING:
    from docker.models.containers import Container

_POLL = 0.3
"""Seconds between two checks of a followed container that does not run."""

_TICK = 1e-6
"""Seconds; the resolution of dockerd's ``since``."""


def lines(container: Container, query: LogQuery[Any]) -> Iterator[TimedLine]:
    """Yield the lines of a container's log. Bytes that are not UTF-8 are replaced.

    TorchX passes times to docker-py, which takes a time without zone for UTC and fails on a time with a zone. When it
    follows a log, it stops at a restart, and yields chunks as written, which may be several lines or part of one.
    """
    start = query.since.timestamp() if query.since is not None else 0.0
    stop = query.until.timestamp() if query.until is not None else None
    tail: int | str = query.tail or "all"
    streams = {"stdout": query.stream != "stderr", "stderr": query.stream != "stdout"}
    while True:
        # Ask before the read: output written just before the app's end is then read, too.
        last = not query.follow or query.has_ended() or (stop is not None and time.time() > stop)
        options: dict[str, float] = {"since": start} if start > 0 else {}
        if stop is not None:
            options["until"] = stop
        try:
            chunks = container.logs(timestamps=True, stream=True, follow=not last, tail=tail, **streams, **options)
            with contextlib.closing(chunks):
                latest = yield from _lines(chunks)
        except NotFound:
            return  # deleted meanwhile
        if last:
            return
        if latest:
            start, tail = max(start, latest + _TICK), "all"
        time.sleep(_POLL)


def _lines(chunks: Iterable[bytes]) -> Generator[TimedLine, None, float]:
    """Join chunks, each of which begins with its timestamp, to lines.

    dockerd splits a long line into several chunks. A line has the time of its last chunk.

    Returns:
        The latest timestamp, in seconds since the epoch; 0.0 without chunks.
    """
    latest, reader = 0.0, LineReader()
    for chunk in chunks:
        stamp, _, text = chunk.partition(b" ")
        latest = max(latest, seconds(stamp.decode(errors="replace")))
        for line in reader.feed(text):
            yield TimedLine(latest, line.decode(errors="replace"))
    if rest := reader.rest():
        yield TimedLine(latest, rest.decode(errors="replace"))
    return latest
