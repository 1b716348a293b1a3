# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the log of one node from CloudWatch: all lines, a time window, or followed through restarts to the job's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from torchx_monarch.backends.aws_batch.client import Aws, AwsError

_POLL = 2.0
"""Seconds between two polls of a followed log. CloudWatch itself lags by some seconds."""

_POLL_THROTTLED = 15.0
"""Seconds until the next poll after AWS has throttled one."""

_SETTLE = 5.0
"""Seconds after a job's end in which CloudWatch may still receive its last lines."""

_TAIL = 200

Poll = Callable[[], tuple[list[tuple[str, str]], bool]]
"""Returns a node's log streams as (group, stream), one for each attempt in order, and whether the job has ended."""


def lines(aws: Aws, look: Poll, *, since: datetime | None, until: datetime | None, follow: bool) -> Iterator[str]:
    """Yield the lines, each with its line end.

    Args:
        aws: sends the requests.
        look: called before each poll.
        since: omit lines written before this time; None for no limit. A time without a zone is local time.
        until: omit lines written after this time; None for no limit.
        follow: wait for further lines until the job has ended.

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
            found, ended = look()
            # Ask before reading: every line written before the end is then still read.
            ended_at = ended_at or (time.monotonic() if ended else 0.0)
            last = not follow or (ended_at > 0 and time.monotonic() >= ended_at + _SETTLE)
            last = last or (until is not None and time.time() > until.timestamp() + _SETTLE)
            while at < len(found):
                for after, line in _read(aws, found[at], token, window):
                    token = after
                    if line is not None:
                        yield line
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
        time.sleep(_POLL)


def _read(aws: Aws, stream: tuple[str, str], token: str, window: dict[str, int]) -> Iterator[tuple[str, str | None]]:
    """Yield the lines of a stream from a token on, and None after each page, each with the token to continue from."""
    group, name = stream
    while True:
        arguments: dict[str, Any] = {"logGroupName": group, "logStreamName": name, "startFromHead": True, **window}
        if token:
            arguments["nextToken"] = token
        try:
            answer = aws.call("logs", "GetLogEvents", **arguments)
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return  # the stream does not exist before its first line
            raise
        # A page's token marks the end of the page, so each of its lines is yielded with that token.
        after = answer["nextForwardToken"]
        for event in answer["events"]:
            yield after, event["message"].rstrip("\n") + "\n"
        # An empty page is not the end. At the end, GetLogEvents returns the token of the request.
        if after == token:
            return
        token = after
        yield token, None


def tail(aws: Aws, stream: tuple[str, str]) -> list[str]:
    """Return the last lines of a stream, 200 at most, without their line ends.

    Raises:
        AwsError: AWS is unreachable or refuses.
    """
    group, name = stream
    answer = aws.call("logs", "GetLogEvents", logGroupName=group, logStreamName=name, startFromHead=False, limit=_TAIL)
    return [event["message"] for event in answer["events"]]
