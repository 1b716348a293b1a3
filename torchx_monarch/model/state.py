# SPDX-License-Identifier: BSD-3-Clause
"""The states of apps and replicas, for processes that do not import TorchX."""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """The state of an app or a replica. The names and meanings are those of ``torchx.specs.AppState``."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"

    @property
    def is_terminal(self) -> bool:
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)

    def __str__(self) -> str:
        return self.value
