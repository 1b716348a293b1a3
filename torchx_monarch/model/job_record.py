# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What every host must know of a job so that another one can go on with it when the leader is lost.

The leader is the host whose process runs the controller: replica 0 until it is lost. Each leader has a term, a number
that is higher than those of all leaders before it. A host that has followed a leader refuses one with a lower term.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttemptProgress:
    """The progress of a job's attempts.

    Attributes:
        attempt: number of the present attempt.
        uncounted: attempts that torchrun does not count as restarts.
        restarts_left: number of restarts that are left after failures of ranks.
        rank_restarts: how often ranks were restarted, as users are told.
        first_log_attempt: number of the first attempt's log folders.
        furthest_step: the step at which the last failures in a row happened; -1 for none.
        failures_at_step: number of these failures.
    """

    attempt: int
    uncounted: int
    restarts_left: int
    rank_restarts: int
    first_log_attempt: int
    furthest_step: int = -1
    failures_at_step: int = 0


@dataclass(frozen=True)
class JobRecord:
    """A job, as the leader distributes it at the start of each attempt and whenever its hosts change.

    Attributes:
        term: the leader's term; 0 for replica 0.
        leader: its replica.
        hosts: replicas of the other hosts that are registered, in ascending order.
        places: replicas of the attempt, in the order of their node ranks.
        progress: the progress of the attempts.
    """

    term: int
    leader: int
    hosts: tuple[int, ...]
    places: tuple[int, ...]
    progress: AttemptProgress
