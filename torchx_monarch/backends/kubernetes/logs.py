# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of one replica through all of its pods: all lines, a time window, or followed until the app ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

from torchx_monarch.backends.core.backend import LogQuery
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.snapshot import Attempt, KubernetesSnapshot

_POLL = 0.5
"""Seconds between two polls of a followed replica that has no running pod."""

_LATE = 2e9
"""Nanoseconds after which a line's time is certainly past by the server's clock, which it tells in whole seconds."""


def lines(
    api: Api, path: str, attempts: Callable[[], Sequence[Attempt]], query: LogQuery[KubernetesSnapshot]
) -> Iterator[TimedLine]:
    """Yield the lines. Bytes that are not UTF-8 are replaced.

    TorchX passes the server a number of seconds for ``since``, which is wrong for a time with a zone, refuses
    ``until``, and stops following when the pod ends.

    Args:
        path: URL path of the pods' collection.

    Raises:
        KubernetesError: the server refuses; a missing pod or a container that has not started counts as an empty log.
    """
    first = _nanoseconds_of(query.since) if query.since else 0
    last = _nanoseconds_of(query.until) if query.until else None
    read: dict[str, int] = {}
    over: set[str] = set()
    while True:
        # Ask before reading: every line written before the end is then still read.
        final = not query.follow or query.has_ended() or (last is not None and api.server_time * 1e9 > last + _LATE)
        for attempt in attempts():
            if attempt.pod in over:
                continue
            start = max(first, read.get(attempt.pod, -1) + 1)
            # The log of a silent pod that is followed would not end at `last`.
            live = query.follow and last is None and not final and attempt.lives
            tail = 0 if attempt.pod in read else query.tail
            for stamp, text in _of_pod(api, f"{path}/{attempt.pod}/log", attempt.container, start, live, tail):
                if last is not None and stamp > last:
                    return
                read[attempt.pod] = stamp
                yield TimedLine(stamp / 1e9, text)
            if not attempt.lives:
                over.add(attempt.pod)
        if final:
            return
        time.sleep(_POLL)


def _of_pod(api: Api, path: str, container: str, start: int, follow: bool, tail: int) -> Iterator[tuple[int, str]]:
    query = {"timestamps": "true", "container": container}
    if follow:
        query["follow"] = "true"
    if tail:
        query["tailLines"] = str(tail)
    if start:
        whole = datetime.fromtimestamp(start // 10**9, timezone.utc)  # the server accepts whole seconds only
        query["sinceTime"] = whole.strftime("%Y-%m-%dT%H:%M:%SZ")
    stamp = 0
    try:
        for line in api.lines(path, **query):
            stamped = line.decode(errors="replace")
            word, _, text = stamped.partition(" ")
            if moment := _nanoseconds(word):
                stamp = moment
            else:  # continuation of a very long line, which carries no timestamp
                text = stamped
            if stamp >= start:
                yield stamp, text
    except KubernetesError as error:
        # 404: the pod no longer exists. 400: its container has not started.
        if error.status not in (400, 404):
            raise


def _nanoseconds(text: str) -> int:
    """Convert ``2026-11-20T10:11:12.123456789Z`` to nanoseconds since the epoch; 0 for any other text."""
    head, dot, tail = text.partition(".")
    digits = tail[: -len(tail.lstrip("0123456789")) or None] if dot else ""
    zone = tail[len(digits) :] if dot else ""
    try:
        whole = datetime.fromisoformat((head + zone).replace("Z", "+00:00"))
    except ValueError:
        return 0
    return int(whole.timestamp()) * 10**9 + int((digits + "0" * 9)[:9])


def _nanoseconds_of(when: datetime) -> int:
    return int(when.timestamp() * 10**6) * 1000
