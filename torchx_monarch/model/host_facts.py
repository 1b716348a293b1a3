# SPDX-License-Identifier: BSD-3-Clause
"""What a host says of itself: its registration, and the facts that the pre-flight compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

from torchx_monarch.model.world import World

HostFacts: TypeAlias = Mapping[str, str]
"""The versions of what a host imports, such as torch, by name, and the digest of the script (``PROGRAM``)."""

PROGRAM = "the program"

NodeFault: TypeAlias = Literal["lost", "failed_alone", "slow"]
"""What a machine may meet in a job: its host was lost, ranks failed on it and not on all, or it slowed the others."""


@dataclasses.dataclass(frozen=True)
class Registration:
    """The data with which a host registers.

    Attributes:
        error: why it cannot take part; empty if it can.
        code: exit code that belongs to ``error``.
        world: that of the last attempt in which it took part, under an earlier replica 0; None for none.
        machine: name of the machine on which the host's container runs; empty if ``hostname`` is that.
        restarts: how often the backend has restarted it, as far as it knows.
    """

    replica: int
    hostname: str
    pid: int
    error: str = ""
    code: int = 1
    world: World | None = None
    machine: str = ""
    restarts: int = 0

    @property
    def name(self) -> str:
        """Return the host's name for messages: ``host 1 (node7, pid 4711)``."""
        return f"host {self.replica} ({self.hostname}, pid {self.pid})"

    @property
    def node(self) -> str:
        return self.machine or self.hostname
