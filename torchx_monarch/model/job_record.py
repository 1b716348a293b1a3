# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What every host must know of a job so that another one can go on with it when the leader is lost.

The leader is the host whose process runs the controller: replica 0 until it is lost. Each leader has a term, a number
that is higher than those of all leaders before it. A host that has followed a leader refuses one with a lower term.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.number_ranges import consecutive
from torchx_monarch.model.role_spec import MOST_REPLICAS
from torchx_monarch.model.session_record import SessionRecord

_REPLICAS = ("hosts", "places", "voters")
"""The fields that hold replicas, which are mostly consecutive: JSON has their runs, for thousands of hosts."""


@dataclass(frozen=True)
class MachineFailures:
    """The failures of a machine that count towards its exclusion.

    Attributes:
        machine: the name under which they are counted.
        times: when they happened, in seconds since the epoch.
        excluded: whether the machine is excluded.
    """

    machine: str
    times: tuple[float, ...]
    excluded: bool


@dataclass(frozen=True)
class AttemptProgress:
    """The progress of a job's attempts.

    Attributes:
        attempt: number of the present attempt; -1 before the first one of a run.
        uncounted: attempts that torchrun does not count as restarts.
        restarts_left: number of restarts that are left after failures of ranks.
        rank_restarts: how often ranks were restarted, as users are told.
        first_log_attempt: number of the first attempt's log folders.
        furthest_step: the step at which the last failures in a row happened; -1 for none.
        failures_at_step: number of these failures.
        failures: the machines that have failed; empty unless machines are excluded after failures.
    """

    attempt: int
    uncounted: int
    restarts_left: int
    rank_restarts: int
    first_log_attempt: int
    furthest_step: int = -1
    failures_at_step: int = 0
    failures: tuple[MachineFailures, ...] = ()


@dataclass(frozen=True)
class JobRecord:
    """A job, as the leader distributes it at the start of each attempt and whenever its hosts change.

    Attributes:
        term: the leader's term; 0 for replica 0.
        leader: its replica.
        hosts: replicas of the other hosts that are registered, in ascending order.
        places: replicas of the attempt, in the order of their node ranks.
        progress: the progress of the attempts.
        listeners: where the first of ``hosts`` listen once they have taken over, in their order; empty on one machine.
        voters: replicas of the hosts, the leader among them, of which a new leader needs more than half: those that
            were registered when the attempt began and are not known to have ended; empty on one machine.
        generation: number of the attempt over all runs and leaders, from 0.
        session: the runs of a live allocation; None in a batch job.
    """

    term: int
    leader: int
    hosts: tuple[int, ...]
    places: tuple[int, ...]
    progress: AttemptProgress
    listeners: tuple[str, ...] = ()
    voters: tuple[int, ...] = ()
    generation: int = 0
    session: SessionRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, in which consecutive replicas are runs: first and last."""
        return {**asdict(self), **{name: consecutive(getattr(self, name)) for name in _REPLICAS}}

    @classmethod
    def from_json(cls, values: Any) -> JobRecord:
        """Decode the result of ``to_json``.

        Raises:
            DecodeError: it is not such an object.
        """
        if not isinstance(values, dict):
            raise DecodeError("the job is no JSON object")
        return decode(cls, {**values, **{name: _replicas(values.get(name)) for name in _REPLICAS}}, "the job")


def _replicas(runs: Any) -> list[int]:
    found: list[int] = []
    for run in runs if isinstance(runs, list) else [None]:
        if not (isinstance(run, list) and [type(each) for each in run] == [int, int]):
            raise DecodeError("the job's replicas are no list of first and last numbers")
        # A short text can name very many.
        if len(found) + run[1] - run[0] >= MOST_REPLICAS:
            raise DecodeError(f"the job has over {MOST_REPLICAS} replicas")
        found += range(run[0], run[1] + 1)
    return found
