# SPDX-License-Identifier: BSD-3-Clause
"""Merge the logs of several replicas, some of which may still be written, in the order of time."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from torchx_monarch.backends.core.backend import TimedLine

PATIENCE = 0.5
"""Seconds that lines of other logs wait for a log that is followed and silent."""

_HELD = 1000
"""Lines of one log that are read ahead."""

K = TypeVar("K")


class LogMerge(Generic[K]):
    """Reads logs in threads and yields their lines in the order of time.

    The threads are daemons: they end with their logs, or with this process.

    Args:
        logs: the lines of each log, in order. A line without a time (0) comes directly after the one before it.
        follow: whether the logs are still written, so that their next lines are not waited for long.
    """

    def __init__(self, logs: Mapping[K, Iterable[TimedLine]], follow: bool) -> None:
        self._keys = list(logs)
        self._follow = follow
        self._held: list[deque[TimedLine]] = [deque() for _ in self._keys]
        self._open = set(range(len(self._keys)))
        self._latest = [0.0] * len(self._keys)
        self._queue: queue.SimpleQueue[tuple[int, TimedLine | Exception | None]] = queue.SimpleQueue()
        self._room = [threading.Semaphore(_HELD) for _ in self._keys]
        self._heap: list[tuple[float, int]] = []
        # Open logs of which no line is held, with the time since when, in that order.
        self._silent = dict.fromkeys(self._open, time.monotonic())
        for index, lines in enumerate(logs.values()):
            threading.Thread(target=self._read, args=(index, lines), name="log", daemon=True).start()

    def _read(self, index: int, lines: Iterable[TimedLine]) -> None:
        try:
            for line in lines:
                self._room[index].acquire()
                self._queue.put((index, line))
            self._queue.put((index, None))
        except Exception as error:
            self._queue.put((index, error))

    def __iter__(self) -> Iterator[tuple[K, TimedLine] | None]:
        """Yield each line with its log's key; None when all lines so far are yielded and no more came for a while.

        Raises:
            Exception: reading a log has failed.
        """
        while self._heap or self._open:
            if self._silent and self._take(self._timeout()):
                continue
            if self._heap:
                yield self._pop()
            else:
                yield None

    def _timeout(self) -> float | None:
        """Return for how many seconds to wait for a silent log; None for as long as it takes."""
        if not self._follow:
            return None
        if not self._heap:
            return PATIENCE
        last = next(reversed(self._silent.values()))
        return max(0.0, last + PATIENCE - time.monotonic())

    def _take(self, timeout: float | None) -> bool:
        """Take what a thread has read; return False if none has read anything in time."""
        try:
            index, line = self._queue.get(timeout=timeout) if timeout != 0.0 else self._queue.get_nowait()
        except queue.Empty:
            return False
        if isinstance(line, Exception):
            raise line
        if line is None:
            self._open.discard(index)
            self._silent.pop(index, None)
            return True
        self._latest[index] = max(self._latest[index], line.time)
        if not self._held[index]:
            self._silent.pop(index, None)
            heapq.heappush(self._heap, (self._latest[index], index))
        self._held[index].append(line._replace(time=self._latest[index]))
        return True

    def _pop(self) -> tuple[K, TimedLine]:
        _, index = self._heap[0]
        line = self._held[index].popleft()
        self._room[index].release()
        if self._held[index]:
            heapq.heapreplace(self._heap, (self._held[index][0].time, index))
        else:
            heapq.heappop(self._heap)
            if index in self._open:
                self._silent[index] = time.monotonic()
        return self._keys[index], line
