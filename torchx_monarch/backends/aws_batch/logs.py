# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The lines of one node's log in CloudWatch: whole, from and to a time, or followed through restarts to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from torchx_monarch.backends.aws_batch.client import Aws, AwsError

_POLL = 2.0
"""Seconds between two looks at a log that is followed; CloudWatch itself is some seconds behind."""

_POLL_THROTTLED = 15.0
"""The same, after AWS has asked for patience."""

_SETTLE = 5.0
"""Seconds after a job's end in which its last lines may still come."""

_TAIL = 200

Look = Callable[[], tuple[list[tuple[str, str]], bool]]
"""Tells the streams of a node, (group, stream), one for each attempt, and whether the job has ended."""


def lines(aws: Aws, look: Look, *, since: datetime | None, until: datetime | None, follow: bool) -> Iterator[str]:
    """The lines, each with its line end.

    Args:
        aws: where they are.
        look: asked again and again when the log is followed.
        since: leave out lines written before; a time without zone is local time.
        until: leave out lines written after.
        follow: wait for more until the job has ended.

    Raises:
        AwsError: AWS refuses; while a log is followed, being throttled is waited out.
    """
    window: dict[str, int] = {}
    if since is not None:
        window["startTime"] = int(since.timestamp() * 1000)
    if until is not None:
        window["endTime"] = int(until.timestamp() * 1000) + 1  # the end itself is not part of the window
    at, token, ended_at = 0, "", 0.0
    while True:
        try:
            found, ended = look()
            # In this order: what was written before the end is read after it is known.
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
    """What there is from a token on: the lines, each with the token to go on from, and at last the token alone."""
    group, name = stream
    while True:
        arguments: dict[str, Any] = {"logGroupName": group, "logStreamName": name, "startFromHead": True, **window}
        if token:
            arguments["nextToken"] = token
        try:
            answer = aws.call("logs", "GetLogEvents", **arguments)
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return  # nothing has been written yet
            raise
        # A page is read as a whole, or not at all: its token stands for the end of it.
        after = answer["nextForwardToken"]
        for event in answer["events"]:
            yield after, event["message"].rstrip("\n") + "\n"
        # Pages may be empty before the end, which is where the token stays what it was.
        if after == token:
            return
        token = after
        yield token, None


def tail(aws: Aws, stream: tuple[str, str]) -> list[str]:
    """The last lines of a stream.

    Raises:
        AwsError: AWS refuses.
    """
    group, name = stream
    answer = aws.call("logs", "GetLogEvents", logGroupName=group, logStreamName=name, startFromHead=False, limit=_TAIL)
    return [event["message"] for event in answer["events"]]
