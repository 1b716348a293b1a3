# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of one node from CloudWatch: lines, followed through restarts to the job's end, and signed results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from torchx_monarch.backends.aws_batch.native import Aws, AwsError
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.system import signed_line

POLL = 2.0
"""Seconds between two polls of a followed log. CloudWatch itself lags by some seconds."""

_POLL_THROTTLED = 15.0
"""Seconds until the next poll after AWS has throttled one."""

_DELAY = 5.0
"""Seconds after a job's end in which CloudWatch may still receive its last lines."""

_MOST_EVENTS = 10_000
"""The most lines that one request returns."""

_TAIL = 200
"""How many of a log's last lines are searched for a result."""

Poll = Callable[[], tuple[list[tuple[str, str]], bool]]
"""Returns a node's log streams as (group, stream), one for each attempt in order, and whether the job has ended."""


def lines(
    aws: Aws, poll: Poll, *, since: datetime | None, until: datetime | None, tail: int = 0, follow: bool
) -> Iterator[TimedLine]:
    """Yield the lines.

    Args:
        since: omit lines written before this time; None for no limit. A time without a zone is local time.
        until: omit lines written after this time; None for no limit.
        tail: how many of each attempt's last lines to yield at least; 0 for all.

    Raises:
        AwsError: AWS is unreachable or refuses; throttling of a followed log only delays the next poll.
    """
    window: dict[str, int] = {}
    if since is not None:
        window["startTime"] = int(since.timestamp() * 1000)
    if until is not None:
        window["endTime"] = int(until.timestamp() * 1000) + 1  # GetLogEvents excludes endTime itself
    at, token, ended_at = 0, "", 0.0
    while True:
        try:
            found, ended = poll()
            # Ask before reading: every line written before the end is then still read.
            ended_at = ended_at or (time.monotonic() if ended else 0.0)
            last = not follow or (ended_at > 0 and time.monotonic() >= ended_at + _DELAY)
            last = last or (until is not None and time.time() > until.timestamp() + _DELAY)
            while at < len(found):
                before = token
                texts, token = _page(aws, found[at], token, window, tail)
                yield from texts
                # An empty page is not the end. At the end, GetLogEvents returns the token of the request.
                if token == before:
                    if at + 1 == len(found):
                        break
                    at, token = at + 1, ""
        except AwsError as error:
            if not follow or not error.throttled:
                raise
            time.sleep(_POLL_THROTTLED)
            continue
        if last:
            return
        time.sleep(POLL)


def _page(
    aws: Aws, stream: tuple[str, str], token: str, window: dict[str, int], tail: int
) -> tuple[list[TimedLine], str]:
    """Return the lines of one page of a stream, and the token of the next page."""
    group, name = stream
    arguments: dict[str, Any] = {"logGroupName": group, "logStreamName": name, "startFromHead": True, **window}
    if token:
        arguments["nextToken"] = token
    elif tail:
        arguments.update({"startFromHead": False, "limit": min(tail, _MOST_EVENTS)})
    try:
        answer = aws.call("logs", "GetLogEvents", **arguments)
    except AwsError as error:
        if error.code == "ResourceNotFoundException":
            return [], token  # the stream does not exist before its first line
        raise
    found = [TimedLine(event["timestamp"] / 1000, event["message"].rstrip("\n") + "\n") for event in answer["events"]]
    return found, answer["nextForwardToken"]


def results(aws: Aws, streams: Sequence[tuple[str, str]], key: str) -> list[str]:
    """Return the last signed result among the last lines of each stream; empty for a stream without one.

    Args:
        key: the key of the job; empty if none of its hosts signs results.
    """
    return [_result(aws, stream, key) for stream in streams] if key else []


def _result(aws: Aws, stream: tuple[str, str], key: str) -> str:
    group, name = stream
    arguments = {"logGroupName": group, "logStreamName": name, "startFromHead": False, "limit": _TAIL}
    with contextlib.suppress(AwsError):
        events = aws.call("logs", "GetLogEvents", **arguments)["events"]
        return next(reversed(signed_line.verified([event["message"] for event in events], key)), "")
    return ""
