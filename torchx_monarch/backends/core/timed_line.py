# SPDX-License-Identifier: BSD-3-Clause
"""Lines of a replica's log, which of them are asked for, and the times that Docker and Kubernetes write before lines
and into their objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

from torchx_monarch.backends.core.snapshot import AppSnapshot

S = TypeVar("S", bound=AppSnapshot)

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


class TimedLine(NamedTuple):
    """One line of a replica's log.

    Attributes:
        time: when it was written, in seconds since the epoch, as exactly as the backend knows it; 0 if it does not.
        text: the line with its line end. A part of an unfinished line, such as a progress bar, has no line end.
        end: where it ends in the log, in bytes; 0 if the backend does not tell.
    """

    time: float
    text: str
    end: int = 0


@dataclass(frozen=True)
class LogQuery(Generic[S]):
    """Which lines of a replica's log to return.

    Attributes:
        since: skip lines written before it; a time without zone is local time; None for no limit.
        until: skip lines written after it; None for no limit.
        stream: ``stdout`` or ``stderr`` alone; empty for both together.
        tail: return at least the last ``tail`` of these lines, and the ones that follow; 0 for all of them. A backend
            may return more, or ignore it: it saves reading a long log.
        ranks: lines of other ranks may be left out, and do not count for ``tail``, as far as the backend knows the
            rank of a line; empty for all ranks.
        follow: whether to wait for more lines until the app has ended; False with ``until``.
        latest: returns the app's current snapshot; None if the app was removed.
        has_ended: returns whether the app has ended or was removed.
    """

    since: datetime | None = None
    until: datetime | None = None
    stream: str = ""
    tail: int = 0
    ranks: Sequence[range] = ()
    follow: bool = False
    latest: Callable[[], S | None] = field(default=lambda: None)
    has_ended: Callable[[], bool] = field(default=lambda: True)


def nanoseconds(text: str) -> int:
    """Convert ``2026-11-20T10:11:12.123456789Z`` to nanoseconds since the epoch; 0 for Go's zero time and other texts.

    ``datetime`` has microseconds only, and Python 3.10's ``fromisoformat`` reads no ``Z``.
    """
    found = _TIME.fullmatch(text)
    if found is None or text.startswith("0001-"):
        return 0
    whole = datetime.fromisoformat(found[1] + found[3].replace("Z", "+00:00"))
    return int(whole.timestamp()) * 10**9 + int((found[2] or "").ljust(9, "0")[:9])


def seconds(text: str | None) -> float:
    """Convert such a time to seconds since the epoch; 0.0 for None and where ``nanoseconds`` is 0."""
    whole, part = divmod(nanoseconds(text or ""), 10**9)
    return whole + part / 1e9
