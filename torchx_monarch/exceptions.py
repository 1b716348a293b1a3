# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exceptions that clients of a live allocation raise."""

from __future__ import annotations

from typing import Any


class UnreachableError(RuntimeError):
    """Raised when a live allocation cannot be reached; the message gives the reason.

    Attributes:
        final: whether waiting for the hosts is useless: there is no certificate, or another program
            listens at the address that the user has given.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RefusedError(RuntimeError):
    """Raised when a live allocation refuses a request; the message comes from the allocation."""


class AllocationError(RuntimeError):
    """Raised when a live allocation has ended or was not ready in time."""


class ClientError(RuntimeError):
    """Raised when this process cannot be a Monarch client of the hosts; the message gives the reason."""


class CodeError(RuntimeError):
    """Raised when a workspace cannot be copied to the hosts of a live allocation; the message gives the reason."""


class SPMDError(RuntimeError):
    """Raised when a run on a live allocation has failed.

    Attributes:
        result: the result of the run (``client.result.RunResult``).
        root_cause: the result of the rank whose failure is the root cause (``client.result.RankResult``); None if the
            run failed for another reason.
        failed_ranks: ranks that failed by themselves; ranks that were stopped are not included.
        tracebacks: Python traceback of each failed rank that has one, by rank.
        log_paths: path of each failed rank's stderr log on its host, by rank.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
        self.root_cause = result.ranks.get(result.cause)
        self.failed_ranks = [rank for rank, one in result.ranks.items() if one.failed]
        self.tracebacks = {rank: one.traceback for rank, one in result.ranks.items() if one.failed and one.traceback}
        self.log_paths = {rank: result.ranks[rank].log_path for rank in self.failed_ranks}
        text = f"run {result.run} failed (exit code {result.exit_code}): {result.reason}"
        if self.root_cause is not None and self.root_cause.traceback:
            text += f"\n\nrank {result.cause}:\n{self.root_cause.traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type[SPMDError], tuple[Any]]:
        return type(self), (self.result,)
