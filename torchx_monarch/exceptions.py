# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The errors of a live allocation and its runs."""

from __future__ import annotations

from typing import Any


class UnreachableError(RuntimeError):
    """A live allocation cannot be reached; the message says why.

    Attributes:
        final: whether waiting for its hosts does not help: there is no certificate, or another
            program listens at the address that the user has given.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RefusedError(RuntimeError):
    """A live allocation does not do what it was asked to; the message is its own."""


class AllocationError(RuntimeError):
    """A live allocation has ended, or did not get ready in time."""


class ClientError(RuntimeError):
    """This process cannot be a Monarch client of these hosts; the message says why."""


class CodeError(RuntimeError):
    """A workspace was not brought to the hosts of a live allocation; the message says why."""


class SPMDError(RuntimeError):
    """A run on a live allocation has failed.

    Attributes:
        result: the whole of it (``client.result.RunResult``).
        root_cause: the rank that began it (``client.result.RankResult``); None where no rank did.
        failed_ranks: ranks that failed by themselves.
        tracebacks: Python tracebacks by rank, of those that have one.
        log_paths: the stderr log of each failed rank, on its host.
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
