# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions of this package.

::

    TorchXMonarchError
    ├── AllocationError         also RuntimeError
    ├── ClientError             also RuntimeError
    ├── CodeError               also RuntimeError
    ├── RefusedError            also RuntimeError
    ├── ResultError             also RuntimeError
    ├── SPMDError               also RuntimeError
    ├── UnreachableError        also RuntimeError
    ├── BackendError            also RuntimeError and TorchX's ComponentValidationException
    │   └── WorkspaceError
    └── UserError               also ValueError and TorchX's ComponentValidationException
        └── InvalidCommandError

All of them can be imported from ``torchx_monarch``. The ones that need TorchX are defined beside the code that raises
them (``backends.core.errors``, ``schedulers.monarch``), because TorchX is slow to import. Each backend derives its own
exceptions from ``BackendError`` and ``UserError``.

An argument of the wrong value or type raises Python's ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchx_monarch.client.result import RankResult, RunResult


class TorchXMonarchError(Exception):
    """The base class of all exceptions that this package raises for its users."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Have pickle call no constructor: some take other arguments than the message."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class UnreachableError(TorchXMonarchError, RuntimeError):
    """Raised when a live allocation cannot be reached; the message gives the reason.

    Attributes:
        final: whether waiting for the hosts is useless: there is no certificate, or another program
            listens at the address that the user has given.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RefusedError(TorchXMonarchError, RuntimeError):
    """Raised when a live allocation refuses a request; the message comes from the allocation."""


class AllocationError(TorchXMonarchError, RuntimeError):
    """Raised when the hosts of a job have ended or were not ready in time; the message gives the state of the job."""


class ClientError(TorchXMonarchError, RuntimeError):
    """Raised when this process cannot be a Monarch client of the hosts; the message gives the reason."""


class CodeError(TorchXMonarchError, RuntimeError):
    """Raised when a workspace cannot be copied to the hosts of a live allocation; the message gives the reason."""


class SPMDError(TorchXMonarchError, RuntimeError):
    """Raised when a run on a live allocation has failed.

    Attributes:
        result: the result of the run.
        root_cause: the result of the rank whose failure is the root cause; None if the run failed for another reason.
        failed_ranks: ranks that failed by themselves; ranks that were stopped are not included.
        tracebacks: Python traceback of each failed rank that has one, by rank.
        log_paths: path of each failed rank's stderr log on its host, by rank.
    """

    def __init__(self, result: RunResult) -> None:
        self.result = result
        self.root_cause: RankResult | None = None if result.cause is None else result.ranks.get(result.cause)
        self.failed_ranks: list[int] = [rank for rank, rank_result in result.ranks.items() if rank_result.failed]
        self.tracebacks: dict[int, str] = {
            rank: result.ranks[rank].traceback for rank in self.failed_ranks if result.ranks[rank].traceback
        }
        self.log_paths: dict[int, str] = {rank: result.ranks[rank].log_path for rank in self.failed_ranks}
        text = f"run {result.run} failed (exit code {result.exit_code}): {result.reason}"
        if self.root_cause is not None and self.root_cause.traceback:
            text += f"\n\nrank {result.cause}:\n{self.root_cause.traceback.rstrip()}"
        super().__init__(text)


class ResultError(TorchXMonarchError, RuntimeError):
    """Raised when a function has returned in all ranks, and the value of some could not be brought to the client.

    Attributes:
        result: the result of the run.
        values: the values of the other ranks, by rank.
        missing: the reason for each rank without a value.
    """

    def __init__(self, result: RunResult, values: Mapping[int, object], missing: Mapping[int, str]) -> None:
        self.result, self.values, self.missing = result, values, missing
        rank, reason = next(iter(missing.items()))
        more = f" ({len(missing) - 1} more in .missing)" if len(missing) > 1 else ""
        super().__init__(f"run {result.run} has no value of rank {rank}: {reason}{more}")
