# SPDX-License-Identifier: BSD-3-Clause
"""The data with which a host registers with replica 0."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Registration:
    """The data with which a host registers.

    Attributes:
        replica: replica id of the host within the role.
        hostname: name of the machine.
        pid: process id of the host process.
        nproc: number of ranks that it will run.
        error: why it cannot take part; empty if it can.
        code: exit code that belongs to ``error``.
        attempt: the last attempt in which it took part, under an earlier replica 0; -1 for none.
        machine: name of the machine on which the host's container runs; empty if ``hostname`` is that.
    """

    replica: int
    hostname: str
    pid: int
    nproc: int
    error: str = ""
    code: int = 1
    attempt: int = -1
    machine: str = ""

    @property
    def name(self) -> str:
        """Return the host's name for messages: ``host 1 (node7, pid 4711)``."""
        return f"host {self.replica} ({self.hostname}, pid {self.pid})"
