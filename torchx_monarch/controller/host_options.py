# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a host process is told on its command line."""

from __future__ import annotations

import dataclasses

from torchx_monarch.transport.lease import LEASE
from torchx_monarch.transport.local_addresses import NetworkOptions


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """The command line of a host process, ``python -m torchx_monarch.host``.

    Attributes:
        app: the app's id.
        role: the role's name.
        replica: which replica of the role this is.
        replicas: how many there are.
        grace: seconds from SIGTERM to SIGKILL for ranks.
        host_timeout: seconds that all hosts have to arrive.
        preload: modules that rank interpreters import ahead.
        replacements: how many lost hosts the backend replaces.
        rejoin_timeout: seconds that a host that has lost replica 0 looks for another.
        rendezvous: where replica 0 listens; empty for MONARCH_RENDEZVOUS, or else a socket of this machine's.
        network: of the hosts, where they are on one.
        retry_on: exit codes after which ranks are started again, as a shell has them; empty for any.
        command: what the role runs.
        lease: seconds for which another host or the agent may be silent until it counts as lost.
        peers: where replica 0 of each role listens, ``NAME=ADDRESS`` with commas; empty for MONARCH_PEERS.
        directory: where replica 0 of the first role listens, which knows where those of the others do; empty for none.
        application: where replica 0 of the first role listens, for roles that begin again together; empty for others.
        beside: how many roles those are beside the first.
        await_roles: those of them whose success the first role waits for before it ends.
    """

    app: str
    role: str
    replica: int
    replicas: int
    grace: float
    host_timeout: float
    preload: tuple[str, ...]
    replacements: int
    rejoin_timeout: float
    rendezvous: str
    network: NetworkOptions
    retry_on: tuple[int, ...]
    command: tuple[str, ...]
    lease: float = LEASE
    peers: str = ""
    directory: str = ""
    application: str = ""
    beside: int = 0
    await_roles: tuple[str, ...] = ()
