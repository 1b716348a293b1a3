# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of a replica through TorchX's ``Scheduler.log_iter``: whichever streams that has."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchx.schedulers.api import Scheduler, Stream

from torchx_monarch.backends.core.backend import LogQuery

_log = logging.getLogger("torchx_monarch")


def lines(inner: Scheduler[Any], app_id: str, role: str, replica: int, query: LogQuery[Any]) -> Iterator[str]:
    """Yield the lines of a log; none if there is no log yet, which TorchX's schedulers say by a ``RuntimeError``.

    Of a scheduler that cannot show both streams as one, those of stdout come first unless the log is followed.

    Raises:
        ValueError: the scheduler does not have this stream.
        NotImplementedError: it reads no logs.
    """

    def read(stream: Stream) -> Iterator[str]:
        try:
            yield from inner.log_iter(app_id, role, replica, None, query.since, query.until, query.follow, stream)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            _log.debug("no log: %s", error)

    has_begun = False
    try:
        for line in read(Stream(query.stream) if query.stream else Stream.COMBINED):
            has_begun = True
            yield line
    except ValueError:
        if query.stream or has_begun:
            raise
        # TorchX's scheduler for Slurm has two files, and shows stderr alone unless it is told which.
        both = [read(stream) for stream in (Stream.STDOUT, Stream.STDERR)]
        yield from _together(both) if query.follow else itertools.chain(*both)


def _together(sources: Sequence[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of several followed logs as they come."""
    found: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()

    def read(source: Iterable[str]) -> None:
        try:
            for line in source:
                found.put(line)
        except Exception as error:
            found.put(error)
        found.put(None)

    for source in sources:
        threading.Thread(target=read, args=[source], daemon=True).start()
    left = len(sources)
    while left:
        line = found.get()
        if isinstance(line, Exception):
            raise line
        if line is None:
            left -= 1
        else:
            yield line
