# SPDX-License-Identifier: BSD-3-Clause
"""What a host says of itself: its registration, and the facts that the pre-flight compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class ProgramFile:
    """The script of a run, with its size in bytes and its SHA-256 in hexadecimal digits."""

    path: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """Facts of one host.

    Attributes:
        versions: those of torch and others by name, as far as the host imports them; none if that has failed.
        program: the script; None for a module or another program, or if the file cannot be read.
    """

    versions: Mapping[str, str]
    program: ProgramFile | None = None


@dataclasses.dataclass(frozen=True)
class Registration:
    """The data with which a host registers.

    Attributes:
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
