# SPDX-License-Identifier: BSD-3-Clause
"""The result of a run on a live allocation, as data classes that can be pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypedDict

from torchx_monarch.insight.summary import show_duration
from torchx_monarch.model.job_result import RankExit


@dataclasses.dataclass(frozen=True)
class RankOutput:
    """The output of one rank, if the run was started with ``output="store"``.

    Attributes:
        stdout: the text that the rank printed on stdout, in whole lines.
        stderr: the text that the rank printed on stderr, in whole lines.
    """

    stdout: str = ""
    stderr: str = ""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The end of one rank in the last attempt of a run.

    Attributes:
        rank: global rank.
        local_rank: local rank on its host.
        replica: replica id of its host.
        hostname: hostname of its host.
        pid: its process id on that host.
        exit_code: its exit code; -n if signal n killed it.
        seconds: seconds from the start of the program to its end; 0 if the start is unknown.
        failed: whether it failed by itself; False if it succeeded or failed only because it was stopped.
        message: the Python exception, of one line or more, without other control characters; empty if the host has no
            exception from the rank.
        traceback: the Python traceback; empty if the host has none.
        log_path: path of its stderr log on its host, with ``stdout.log`` in the same folder; empty without log files.
    """

    rank: int
    local_rank: int
    replica: int
    hostname: str
    pid: int
    exit_code: int
    seconds: float
    failed: bool
    message: str
    traceback: str = dataclasses.field(repr=False)
    log_path: str


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one run.

    Attributes:
        run: number of the run on its allocation, from 1.
        exit_code: 0, or the exit code of the root cause; 128+n for signal n.
        reason: why the run ended, in one line.
        ranks: results of the ranks of the last attempt, by global rank; empty if no rank was started.
        attempts: number of attempts.
        seconds: seconds from the start of the run to its end, without the time in the queue.
        code: hash of the workspace that the hosts got a copy of; empty without one.
        stopped: whether the run was stopped, by a client, its timeout or the end of the hosts.
        cause: global rank of the root cause; None if no rank caused the failure, or the run succeeded.
        output: output of each rank, by global rank; empty unless the run was started with ``output="store"``.
    """

    run: int
    exit_code: int
    reason: str
    ranks: Mapping[int, RankResult] = dataclasses.field(default_factory=dict)
    attempts: int = 1
    seconds: float = 0.0
    code: str = ""
    stopped: bool = False
    cause: int | None = None
    output: Mapping[int, RankOutput] = dataclasses.field(default_factory=dict)

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit code of each rank, by global rank."""
        return {rank: result.exit_code for rank, result in self.ranks.items()}

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "failed" if self.exit_code else "succeeded"
        reason = f": {self.reason}" if self.exit_code else ""
        return f"<run {self.run} {state} after {show_duration(self.seconds)}, {len(self.ranks)} ranks{reason}>"


class RunInfo(TypedDict):
    """The state of a run, as ``SPMDJob.runs`` lists it.

    Attributes:
        run: number of the run on its allocation, from 1.
        state: ``queued``, ``running``, ``succeeded``, ``failed`` or ``stopped``.
        command: the command, for display.
        cwd: folder in which the ranks start; empty for their copy of the workspace.
        code: hash of the workspace that the hosts got a copy of; empty without one.
        by: ``USER@HOSTNAME`` of the client that submitted the run.
        submitted: time at which the hosts accepted the run, in seconds since the epoch.
        started: time of its start, in seconds since the epoch; 0 before it.
        ended: time of its end, in seconds since the epoch; 0 before it.
        exit_code: 0, or the exit code of the root cause; 128+n for signal n; None before the end.
        reason: why the run ended, in one line; empty before the end.
    """

    run: int
    state: str
    command: str
    cwd: str
    code: str
    by: str
    submitted: float
    started: float
    ended: float
    exit_code: int | None
    reason: str


def rank_result(exit: RankExit) -> RankResult:
    """Return the end of a rank as a client sees it."""
    return RankResult(
        rank=exit.rank,
        local_rank=exit.local_rank,
        replica=exit.replica,
        hostname=exit.hostname,
        pid=exit.pid,
        exit_code=exit.code,
        seconds=max(0.0, exit.time - exit.started) if exit.started else 0.0,
        failed=exit.failed,
        message=exit.message,
        traceback=exit.traceback,
        log_path=exit.stderr_path,
    )
