# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The lines of one replica's log, through all of its pods: whole, from and to a time, or followed to the app's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

from torchx_monarch.backends.kubernetes.api import Api, KubernetesError
from torchx_monarch.backends.kubernetes.status import Attempt

_POLL = 0.5
"""Seconds between two looks at a replica that is followed and has no pod that runs."""


def lines(
    api: Api,
    path: str,
    attempts: Callable[[], Sequence[Attempt]],
    *,
    since: datetime | None,
    until: datetime | None,
    follow: bool,
    ended: Callable[[], bool],
) -> Iterator[str]:
    """The lines, each with its end. Bytes that are no UTF-8 are replaced.

    Args:
        api: the cluster.
        path: of the pods' collection.
        attempts: the replica's pods as they are now, the oldest first.
        since: leave out lines written before; a time without zone is local time. (Upstream asks the server, which has
            whole seconds, with a number that is wrong for a time with a zone.)
        until: leave out lines written after. (Upstream refuses it.)
        follow: wait for more until the app has ended. (Upstream stops with the pod.)
        ended: whether the app has ended.
    """
    first = _nanoseconds_of(since) if since else 0
    last = _nanoseconds_of(until) if until else None
    read: dict[str, int] = {}
    over: set[str] = set()
    while True:
        # In this order: what was written before the end is read after it is known.
        final = not follow or ended()
        for one in attempts():
            if one.pod in over:
                continue
            start = max(first, read.get(one.pod, -1) + 1)
            live = follow and not final and one.lives
            for stamp, text in _of_pod(api, f"{path}/{one.pod}/log", one.container, start, live):
                if last is not None and stamp > last:
                    return
                read[one.pod] = stamp
                yield text
            if not one.lives:
                over.add(one.pod)
        if final:
            return
        time.sleep(_POLL)


def _of_pod(api: Api, path: str, container: str, start: int, follow: bool) -> Iterator[tuple[int, str]]:
    query = {"timestamps": "true", "container": container}
    if follow:
        query["follow"] = "true"
    if start:
        whole = datetime.fromtimestamp(start // 10**9, timezone.utc)  # the server knows whole seconds alone
        query["sinceTime"] = whole.strftime("%Y-%m-%dT%H:%M:%SZ")
    stamp = 0
    try:
        for line in api.lines(path, **query):
            stamped = line.decode(errors="replace")
            word, _, text = stamped.partition(" ")
            if moment := _nanoseconds(word):
                stamp = moment
            else:  # a further piece of a very long line
                text = stamped
            if stamp >= start:
                yield stamp, text
    except KubernetesError as error:
        # Not there any more, or its container has not started.
        if error.status not in (400, 404):
            raise


def _nanoseconds(text: str) -> int:
    """Of ``2026-11-20T10:11:12.123456789Z``, since the epoch; 0 for another word."""
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
