# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of one replica through all of its pods: all lines, a time window, or followed until the app ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

from torchx_monarch.backends.core.backend import LogQuery
from torchx_monarch.backends.core.timed_line import TimedLine, nanoseconds
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.snapshot import Attempt, KubernetesSnapshot

_POLL = 0.5
"""Seconds between two polls of a followed replica that has no running pod."""


def lines(
    api: Api, path: str, attempts: Callable[[], Sequence[Attempt]], query: LogQuery[KubernetesSnapshot]
) -> Iterator[TimedLine]:
    """Yield the lines. Bytes that are not UTF-8 are replaced. What does not exist or has not started has an empty log.

    TorchX passes the server a number of seconds for ``since``, which is wrong for a time with a zone, refuses
    ``until``, and stops following when the pod ends.
    """
    since = int(query.since.timestamp() * 10**6) * 1000 if query.since else 0
    until = int(query.until.timestamp() * 10**6) * 1000 if query.until else None
    read: dict[str, int] = {}
    ended: set[str] = set()
    while True:
        # Ask before reading: every line written before the end is then still read.
        final = not query.follow or query.has_ended()
        for attempt in attempts():
            if attempt.name in ended:
                continue
            options = {"timestamps": "true", "container": attempt.container}
            if not final and attempt.is_running:
                options["follow"] = "true"
            if query.tail and attempt.name not in read:
                options["tailLines"] = str(query.tail)
            start = max(since, read.get(attempt.name, -1) + 1)
            for stamp, text in _lines_of_pod(api, f"{path}/{attempt.name}/log", start, options):
                if until is not None and stamp > until:
                    return
                read[attempt.name] = stamp
                yield TimedLine(stamp / 1e9, text)
            if not attempt.is_running:
                ended.add(attempt.name)
        if final:
            return
        time.sleep(_POLL)


def _lines_of_pod(api: Api, path: str, start: int, options: dict[str, str]) -> Iterator[tuple[int, str]]:
    if start:  # the server accepts whole seconds only
        options["sinceTime"] = datetime.fromtimestamp(start // 10**9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    stamp = 0
    try:
        for line in api.lines(path, **options):
            text = line.decode(errors="replace")
            word, _, rest = text.partition(" ")
            if moment := nanoseconds(word):  # none: the continuation of a very long line, which carries no timestamp
                stamp, text = moment, rest
            if stamp >= start:
                yield stamp, text
    except KubernetesError as error:
        # 404: the pod no longer exists. 400: its container has not started.
        if error.status not in (400, 404):
            raise
