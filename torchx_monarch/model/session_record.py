# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What every host of a live allocation knows of its runs, so that another host can go on with them."""

from __future__ import annotations

from dataclasses import dataclass

from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.run_request import RunRequest


@dataclass(frozen=True)
class RunRecord:
    """A run of a live allocation.

    Attributes:
        number: number of the run, from 1.
        token: identifies the run on the hosts, whichever of them leads.
        request: the client's request; without command and environment once the run has ended.
        ranks: number of ranks; 0 before the hosts have started the run.
        submitted: time of acceptance, in seconds since the epoch.
        started: time of the start, in seconds since the epoch; 0 before it.
        ended: time of the end, in seconds since the epoch; 0 before it.
        result: result of the run; None before its end.
        ending: result of the run after a request to end it; None without such a request.
    """

    number: int
    token: str
    request: RunRequest
    ranks: int
    submitted: float
    started: float
    ended: float
    result: JobResult | None
    ending: JobResult | None


@dataclass(frozen=True)
class SessionRecord:
    """The runs of a live allocation.

    Attributes:
        last: number of the last run that was accepted; 0 for none.
        ended: number of runs that have ended after they had started.
        runs: the newest runs that have ended, the current one, and those in the queue, in the order of their numbers.
    """

    last: int
    ended: int
    runs: tuple[RunRecord, ...]
