# SPDX-License-Identifier: BSD-3-Clause
"""Decisions about restarts: whether another attempt may help. ``model.backoff`` decides how long it waits.

torchrun restarts immediately, as long as ``--max-restarts`` lasts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torchx_monarch.model.host_result import no_retry_reason
from torchx_monarch.model.job_result import JobResult, RankExit, shell_code


class SameStep:
    """Count failures in a row at one step of the program, for programs that report their steps.

    Ranks of a synchronous program may have reported different steps when one of them fails, so a failure one step
    before the furthest one is a failure at the same step.
    """

    def __init__(self) -> None:
        self._furthest = -1
        self._in_a_row = 0

    def why_not(self, exits: Iterable[RankExit], cause: RankExit, limit: int) -> str:
        """Return why the ranks must not be restarted after ``limit`` failures at a step (0: any); empty if they may be.

        The step of the root cause counts, or the furthest if it has reported none.
        """
        step = cause.step
        if step is None:
            step = max((rank_exit.step for rank_exit in exits if rank_exit.step is not None), default=None)
        if step is None:
            return ""
        if self._furthest - 1 <= step <= self._furthest:
            self._in_a_row += 1
        else:
            self._furthest, self._in_a_row = step, 1
        if limit <= 0 or self._in_a_row < limit:
            return ""
        return f"{self._in_a_row} failures in a row at step {self._furthest}, without progress (same_step_limit)"


def never_joined(exits: Iterable[RankExit]) -> frozenset[int]:
    """Return the ranks that failed while forming their first process group."""
    return frozenset(rank_exit.rank for rank_exit in exits if rank_exit.failed and rank_exit.joined is False)


def why_not(
    cause: RankExit,
    failed_now: Collection[int],
    failed_before: Collection[int],
    retry_on: Collection[int],
    on_hang: str = "restart",
) -> str:
    """Return why the ranks must not be restarted; empty if they may be.

    ``failed_now`` and ``failed_before`` are the results of ``never_joined`` for this and the previous attempt.
    ``retry_on`` are exit codes, as a shell reports them, after which ranks are restarted; empty for any.
    """
    if cause.hang:
        return "" if on_hang == "restart" else f"the ranks hung (on_hang={on_hang})"
    code = shell_code(cause.code)
    if not cause.began:
        return "the program cannot even begin"
    if reason := _forbidden_by(code, retry_on):
        return reason
    again = set(failed_now) & set(failed_before)
    if cause.rank in failed_now and again:
        return f"rank {min(again)} has failed twice in a row before it was in a process group"
    return ""


def why_no_other_start(result: JobResult, retry_on: Collection[int]) -> str:
    """Return why the hosts of a job must not be restarted, judged by the program's exit code; empty if they may be.

    A failure of hosts or machines, without a rank as its cause, never forbids a restart.
    """
    return _forbidden_by(result.code, retry_on) if result.code and result.cause is not None else ""


def _forbidden_by(code: int, retry_on: Collection[int]) -> str:
    if reason := no_retry_reason(code, None):
        return reason
    if retry_on and code not in retry_on:
        return f"exit code {code} is not one of {', '.join(map(str, sorted(retry_on)))} (retry_on)"
    return ""
