# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of one node from CloudWatch: lines, followed through restarts to the job's end, and signed results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchx_monarch.backends.aws_batch.native import Aws, AwsError
from torchx_monarch.backends.core.backend import LogQuery
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.model.host_result import verified

POLL = 2.0
"""Seconds between two polls of a followed log. CloudWatch itself lags by some seconds."""

_DELAY = 5.0
"""Seconds after a job's end in which CloudWatch may still receive its last lines."""

_MAX_EVENTS = 10_000
"""The most lines that one request returns."""

_TAIL = 200
"""How many of a log's last lines are searched for a result."""


def lines(aws: Aws, streams: Callable[[], list[tuple[str, str]]], query: LogQuery[Any]) -> Iterator[TimedLine]:
    """Yield the lines of a node's log streams (group, stream)."""
    window: dict[str, int] = {}
    if query.since is not None:
        window["startTime"] = int(query.since.timestamp() * 1000)
    if query.until is not None:
        window["endTime"] = int(query.until.timestamp() * 1000) + 1  # GetLogEvents excludes endTime itself
    at, token, ended_at = 0, "", 0.0
    while True:
        found = streams()
        # Ask before reading: every line written before the end is then still read.
        if not ended_at and (not query.follow or query.has_ended()):
            ended_at = time.monotonic()
        last = not query.follow or (ended_at > 0 and time.monotonic() >= ended_at + _DELAY)
        while at < len(found):
            before = token
            page, token = _page(aws, found[at], token, window, query.tail)
            yield from page
            # An empty page is not the end. At the end, GetLogEvents returns the token of the request.
            if token == before:
                if at + 1 == len(found):
                    break
                at, token = at + 1, ""
        if last:
            return
        time.sleep(POLL)


def _page(
    aws: Aws, stream: tuple[str, str], token: str, window: dict[str, int], tail: int
) -> tuple[list[TimedLine], str]:
    more: dict[str, Any] = {"startFromHead": True, **window}
    if token:
        more["nextToken"] = token
    elif tail:
        more.update({"startFromHead": False, "limit": min(tail, _MAX_EVENTS)})
    try:
        answer = _events(aws, stream, **more)
    except AwsError as error:
        if error.code == "ResourceNotFoundException":
            return [], token  # the stream does not exist before its first line
        raise
    page = [TimedLine(event["timestamp"] / 1000, event["message"].rstrip("\n") + "\n") for event in answer["events"]]
    return page, answer["nextForwardToken"]


def last_result(aws: Aws, stream: tuple[str, str], key: str) -> str:
    """Return the last result among the last lines of a stream that is signed with a key; empty if there is none."""
    with contextlib.suppress(AwsError):
        events = _events(aws, stream, startFromHead=False, limit=_TAIL)["events"]
        return next(reversed(verified([event["message"] for event in events], key)), "")
    return ""


def _events(aws: Aws, stream: tuple[str, str], **more: Any) -> dict[str, Any]:
    return aws.call("logs", "GetLogEvents", logGroupName=stream[0], logStreamName=stream[1], **more)
