# SPDX-License-Identifier: BSD-3-Clause
"""One replica as data: the process to start, and how its latest start went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchx_monarch.backends.core.snapshot import ReplicaSnapshot
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.state import State


@dataclass
class ReplicaRequest:
    """One process to start.

    Attributes:
        args: the command; its first word is looked up on the PATH of the replica's environment, then in ``cwd``.
        env: variables that are set over the submitter's environment.
        cwd: the working directory.
    """

    args: list[str]
    env: dict[str, str]
    cwd: str


@dataclass
class ReplicaRecord:
    """One replica, in its latest start.

    Attributes:
        id: id of the replica.
        state: its state.
        pid: its process; None before the start.
        exit_code: as in ``subprocess``, -N for signal N; None while it runs, or if no process observed the end.
        restarts: how often it was restarted.
        error: the content of its error file, or of a substitute made from the exit code, as JSON text; None without
            failure.
        started, ended: seconds since the epoch; None if that has not happened.
    """

    id: int
    state: State = State.PENDING
    pid: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    error: str | None = None
    started: Seconds | None = None
    ended: Seconds | None = None

    def snapshot(self, role: str, **more: Any) -> ReplicaSnapshot:
        """Return the snapshot of a replica.

        Args:
            more: further fields, and fields that differ from the record's.
        """
        times = {"started": self.started or 0.0, "ended": self.ended or 0.0}
        fields = {"exit_code": self.exit_code, "restarts": self.restarts, "state": self.state}
        return ReplicaSnapshot(role, self.id, **{**fields, **times, **more})
