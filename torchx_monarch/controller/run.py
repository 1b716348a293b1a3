# SPDX-License-Identifier: BSD-3-Clause
"""One run of a live allocation, as replica 0 holds it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from torchx_monarch.insight.run_log import RunLog
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.run_request import RunRequest


@dataclasses.dataclass(eq=False)
class Run:
    """One run.

    Attributes:
        number: number of the run, from 1.
        request: the client's request.
        run_log: the records of the run.
        token: identifies the run on the hosts, even after a restart of this replica 0.
        submitted: time of acceptance, in seconds since the epoch.
        started: time of the start, in seconds since the epoch; 0 before it.
        ended: time of the end, in seconds since the epoch; 0 before it.
        result: result of the run; None before its end.
        ending: result of the run after a request to end it; None without such a request.
        ranks: number of ranks; 0 before the hosts have started the run.
    """

    number: int
    request: RunRequest
    run_log: RunLog
    token: str
    submitted: float = dataclasses.field(default_factory=time.time)
    started: float = 0.0
    ended: float = 0.0
    result: JobResult | None = None
    ending: JobResult | None = None
    ranks: int = 0

    @property
    def state(self) -> str:
        """Return ``queued``, ``running``, ``succeeded``, ``failed`` or ``stopped``."""
        if self.result is None:
            return "running" if self.started else "queued"
        return "stopped" if self.result.stopped else "failed" if self.result.code else "succeeded"

    @property
    def last_record(self) -> dict[str, Any] | None:
        """The last record of its log; None before the end."""
        if self.result is None:
            return None
        return {
            "type": "result",
            "run": self.number,
            "exit_code": self.result.code,
            "reason": self.result.reason,
            "stopped": self.result.stopped,
            "cause": self.result.cause.rank if self.result.cause else None,
            "started": self.started,
            "seconds": self.ended - (self.started or self.ended),
            "code": self.request.code,
        }

    def describe(self) -> str:
        """Return a description of the run for messages."""
        since = time.time() - (self.started or self.submitted)
        by = f" by {self.request.by}" if self.request.by else ""
        return f"run {self.number}{by} ({self.state} for {since:.0f} s: {self.request.shown})"

    def why_no_rank(self, rank: int | None) -> str:
        """Return why the run has no such rank; empty if it has, if ``rank`` is None, or if it has not started yet."""
        if rank is None or 0 <= rank < self.ranks:
            return ""
        if not self.ranks:
            return f"run {self.number} has started no ranks" if self.result else ""
        existing = f"ranks 0 to {self.ranks - 1}" if self.ranks > 1 else "rank 0 alone"
        return f"run {self.number} has no rank {rank}; it has {existing}"

    def to_json(self) -> dict[str, Any]:
        """Return the run's state as JSON values for a client."""
        return {
            "run": self.number,
            "state": self.state,
            "command": self.request.shown,
            "cwd": self.request.cwd,
            "code": self.request.code,
            "by": self.request.by,
            "submitted": self.submitted,
            "started": self.started,
            "ended": self.ended,
            "exit_code": self.result.code if self.result else None,
            "reason": self.result.reason if self.result else "",
        }
