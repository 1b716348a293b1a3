# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The lines of one container's log: whole, from and to a time, or followed through its restarts until the app's end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from docker.errors import NotFound

from torchx_monarch.backends.docker import status
from torchx_monarch.system.line_output import LineReader

if TYPE_CHECKING:
    from docker.models.containers import Container

_POLL = 0.3
"""Seconds between two looks at a container that is followed and does not run."""

_TICK = 1e-6
"""Seconds; what dockerd gives ``since`` a time for."""


def lines(
    container: Container,
    *,
    stdout: bool,
    stderr: bool,
    since: datetime | None,
    until: datetime | None,
    follow: bool,
    ended: Callable[[], bool],
) -> Iterator[str]:
    """The lines, each with its line end. Bytes that are no UTF-8 are replaced.

    Args:
        since: leave out lines written before; a time without zone is local time. (Upstream hands it to docker-py, which
            takes such a time for UTC and fails on one with a zone.)
        until: leave out lines written after.
        follow: wait for more until the app has ended. (Upstream stops at a restart, and yields what was written at a
            time, which may be several lines or part of one.)
        ended: whether the app has ended.
    """
    start = since.timestamp() if since is not None else 0.0
    stop = until.timestamp() if until is not None else None
    while True:
        # In this order: what was written before the end is read after it is known.
        last = not follow or ended() or (stop is not None and time.time() > stop)
        options: dict[str, float] = {"since": start} if start > 0 else {}
        if stop is not None:
            options["until"] = stop
        try:
            chunks = container.logs(
                stdout=stdout, stderr=stderr, timestamps=True, stream=True, follow=follow and not last, **options
            )
            with contextlib.closing(chunks):
                latest = yield from _lines(chunks)
        except NotFound:
            return  # deleted meanwhile
        if last:
            return
        start = max(start, latest + _TICK if latest else 0.0)
        time.sleep(_POLL)


def _lines(chunks: Iterable[bytes]) -> Generator[str, None, float]:
    """Joins the chunks, of which each has its time before it, to lines; returns the latest time.

    A line that is too long for dockerd comes in several chunks.
    """
    latest, reader = 0.0, LineReader()
    for chunk in chunks:
        stamp, _, text = chunk.partition(b" ")
        latest = max(latest, status.seconds(stamp.decode(errors="replace")))
        for line in reader.feed(text):
            yield line.decode(errors="replace")
    if rest := reader.rest():
        yield rest.decode(errors="replace")
    return latest
