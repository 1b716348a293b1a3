# SPDX-License-Identifier: BSD-3-Clause
"""One attempt: how its ranks, or the commands of a role, have started and ended, and whether another one may help."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Literal

from torchx_monarch.controller.host_messages import Exits
from torchx_monarch.controller.members import Member
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_result import forbidden_by
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import (
    JobResult,
    RankExit,
    describe_failure,
    exit_records,
    root_cause,
    shell_code,
    steps_of_all,
)
from torchx_monarch.model.world import World


@dataclasses.dataclass
class Attempt:
    """One attempt of a run, or the only one of the commands of a role.

    Attributes:
        number: counts all attempts of the run, from 0.
        restart_count: TORCHELASTIC_RESTART_COUNT; as under torchrun, a host that joins adds none.
        restarts_used: how many of torchrun's ``--max-restarts`` have been used.
        has_begun: whether its ranks may have started.
        exits: those of its ranks, by rank; before it has begun, those of the attempt before.
    """

    number: int = 0
    restart_count: int = 0
    restarts_used: int = 0
    has_begun: bool = False
    exits: dict[int, RankExit] = dataclasses.field(default_factory=dict)
    _is_recorded: bool = False

    def next(self, *, is_restart: bool = True, is_charged: bool = False) -> Attempt:
        """Return the attempt after this one, for which one of torchrun's restarts may have been used."""
        used = self.restarts_used + is_charged
        return Attempt(self.number + 1, self.restart_count + is_restart, used, exits=self.exits)

    def begin(self) -> None:
        self.has_begun, self.exits = True, {}

    def report_start(
        self,
        reporter: Reporter,
        what: Literal["ranks", "commands"],
        world: World,
        members: Iterable[Member],
    ) -> None:
        """Report what these hosts have started."""
        launched = [(member.host, member.launched) for member in members if member.launched is not None]
        shown = [
            {
                "replica": host.replica,
                "node": host.node,
                "first_rank": world.place(host.replica).first_rank,
                "pids": answer.pids,
                "imported": answer.imported,
            }
            for host, answer in launched
        ]
        unshared = next((answer.unshared for _, answer in launched if answer.unshared), "")
        more = {"count": world.size, "unshared": unshared} if what == "ranks" else {}
        text = f"{what} {world.size}/{world.size}"
        reporter.ranks_started(text, shown, attempt=world.attempt, log_attempt=world.log_attempt, **more)

    def add(self, exits: Exits) -> None:
        self.exits.update({rank_exit.rank: rank_exit for rank_exit in exits})

    @property
    def cause(self) -> RankExit | None:
        return root_cause(self.exits.values())

    def failure(self, cause: RankExit, size: int) -> JobResult:
        """Return the result of the job if this failure ends it; ``size`` is the number of ranks."""
        return JobResult(shell_code(cause.code), describe_failure(self.exits.values(), cause, size), cause)

    def record_end(self, reporter: Reporter) -> None:
        """Report how its ranks have ended as an event, once; nothing if they have not started."""
        if self.exits and self.has_begun and not self._is_recorded:
            self._is_recorded = True
            text = f"attempt {self.number + 1} has ended"
            steps = steps_of_all(self.exits.values())
            fields = {} if steps is None else {"steps": dataclasses.asdict(steps)}
            reporter.ranks_ended(text, exit_records(self.exits, self.cause), attempt=self.number, **fields)


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


def why_no_restart(cause: RankExit, failed_now: Collection[int], failed_before: Collection[int], spec: HostSpec) -> str:
    """Return why the ranks must not be restarted; empty if they may be.

    ``failed_now`` and ``failed_before`` are the results of ``never_joined`` for this and the previous attempt.
    """
    if cause.hang:
        return "" if spec.on_hang == "restart" else f"the ranks hung (on_hang={spec.on_hang})"
    code = shell_code(cause.code)
    if not cause.began:
        return "the program cannot even begin"
    if reason := forbidden_by(code, spec.retry_on):
        return reason
    again = set(failed_now) & set(failed_before)
    if cause.rank in failed_now and again:
        return f"rank {min(again)} has failed twice in a row before it was in a process group"
    return ""
