# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a run on a live allocation ended: plain values that can be pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchx_monarch.model.job_result import RankExit


@dataclasses.dataclass(frozen=True)
class RankOutput:
    """What one rank has printed, where a run was told to store it.

    Attributes:
        stdout: as it was shown, whole lines.
        stderr: likewise.
    """

    stdout: str = ""
    stderr: str = ""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """One rank of the last attempt of a run.

    Attributes:
        rank: global rank.
        local_rank: its number on its host.
        replica: id of its host's replica.
        hostname: where it ran.
        pid: its process.
        exit_code: -n for death by signal n.
        seconds: from the start of its program to its end.
        failed: whether it failed by itself, and was not stopped.
        message: the exception, in one line, where there was one.
        traceback: likewise; empty without one.
        log_path: its stderr, on its host; ``stdout.log`` lies beside it.
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
    traceback: str
    log_path: str

    @classmethod
    def of(cls, exit: RankExit) -> RankResult:
        """From what its host says."""
        return cls(
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


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One run.

    Attributes:
        run: its number on its allocation, from 1.
        exit_code: 0, or that of the rank that began the failure; 128+n for a signal.
        reason: one line for a person.
        ranks: those of the last attempt, by rank; empty when none was started.
        attempts: how often they were started.
        seconds: from the start of the run to its end, without the time that it waited for another.
        code: hash of the code that was brought; empty where none was.
        stopped: whether it was told to end, by a client, its timeout or the end of the hosts.
        cause: the rank that began the failure; None where no rank did.
        output: what each rank has printed, where it was stored.
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
        """By rank."""
        return {rank: one.exit_code for rank, one in self.ranks.items()}

    @classmethod
    def of(
        cls, message: Mapping[str, Any], exits: Mapping[int, RankExit], attempts: int, output: Mapping[int, RankOutput]
    ) -> RunResult:
        """From a run's last records."""
        return cls(
            run=message["run"],
            exit_code=message["exit_code"],
            reason=message["reason"],
            ranks={rank: RankResult.of(exits[rank]) for rank in sorted(exits)},
            attempts=attempts,
            seconds=message["seconds"],
            code=message["code"],
            stopped=message["stopped"],
            cause=message["cause"],
            output=dict(output),
        )
