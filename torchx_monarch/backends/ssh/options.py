# SPDX-License-Identifier: BSD-3-Clause
"""The run options of monarch_ssh."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchx_monarch.backends.core.options import NetworkOpts


@dataclass
class SshOpts(NetworkOpts):
    """The run options of monarch_ssh."""

    hosts: list[str] = field(default_factory=list)
    """The machines, as ssh names them: `alice@a;b;10.0.0.3:2222`, IPv6 addresses in brackets; or `@FILE`, a file with a
    machine on each line. Replica K of each role runs on the K-th of them."""

    python: str = "python3"
    """The Python interpreter on the machines, in whose environment torchx-monarch is installed."""

    setup: str = ""
    """Shell commands that each machine runs before Python, such as `source env.sh`; what they export is the environment
    of the replicas."""
