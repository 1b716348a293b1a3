# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether another attempt may help, and when. torchrun makes one at once, as long as ``--max-restarts`` lasts."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable

from torchx_monarch.model.job_result import JobResult, RankExit, no_retry_reason, shell_code

_FIRST_DELAY = 1.0
"""Seconds before the second restart in a row, at most. Each further one may take twice as long."""

_LONGEST_DELAY = 60.0

_LIVED = 60.0
"""Seconds after which an attempt has done something: its failure is not the continuation of the one before."""


class Backoff:
    """How long to wait before the ranks are started again, so that a program that fails at once does not spin.

    The first restart, and the first after an attempt that lived, is immediate. The delays of further ones double, up to
    a minute. Each is drawn from its upper half: jobs that a common cause has ended do not all come back at one moment.

    Args:
        draw: a number from 0 up to 1.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._in_a_row = 0

    def delay(self, lived: float) -> float:
        """Seconds to wait before the next attempt.

        Args:
            lived: seconds for which the last attempt ran.
        """
        if lived >= _LIVED:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row == 1:
            return 0.0
        longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(self._in_a_row - 2, 32))
        return longest * (0.5 + self._draw() / 2)


def never_joined(exits: Iterable[RankExit]) -> frozenset[int]:
    """The ranks that failed in forming their process group, and had not been in one before."""
    return frozenset(one.rank for one in exits if one.failed and one.joined is False)


def why_not(
    cause: RankExit, failed_now: Collection[int], failed_before: Collection[int], retry_on: Collection[int]
) -> str:
    """Why the ranks are not to be started again; empty when they are.

    Args:
        cause: the rank that began the failure.
        failed_now: what ``never_joined`` says of this attempt.
        failed_before: and of the attempt before.
        retry_on: the exit codes, as a shell has them, after which they may be; empty for any.
    """
    code = shell_code(cause.code)
    if not cause.began:
        return "the program cannot even begin"
    if reason := _said_by(code, retry_on):
        return reason
    again = set(failed_now) & set(failed_before)
    if cause.rank in failed_now and again:
        return f"rank {min(again)} has failed twice in a row before it was in a process group"
    return ""


def why_no_other_start(verdict: JobResult, retry_on: Collection[int]) -> str:
    """Why hosts whose job has ended so are not to be started again, by the program's exit code; empty when they may be.

    Args:
        verdict: how it ended. What befell hosts or machines says nothing of the program.
        retry_on: the exit codes, as a shell has them, after which they may be; empty for any.
    """
    return _said_by(verdict.code, retry_on) if verdict.code and verdict.cause is not None else ""


def _said_by(code: int, retry_on: Collection[int]) -> str:
    if reason := no_retry_reason(code, None):
        return reason
    if retry_on and code not in retry_on:
        return f"exit code {code} is not one of {', '.join(map(str, sorted(retry_on)))} (retry_on)"
    return ""
