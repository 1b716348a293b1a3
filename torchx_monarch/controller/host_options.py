# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options of a host process, as given on its command line."""

from __future__ import annotations

import dataclasses

from torchx_monarch.transport.lease import LEASE
from torchx_monarch.transport.local_addresses import NetworkOptions


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """The command line of a host process, ``python -m torchx_monarch.host``.

    Attributes:
        app: id of the app.
        role: name of the role.
        replica: replica id of this host within the role.
        replicas: number of replicas of the role.
        grace: seconds from SIGTERM to SIGKILL for ranks.
        host_timeout: seconds for all hosts to arrive.
        preload: modules that rank interpreters import in advance.
        replacements: number of lost hosts that the backend replaces.
        rejoin_timeout: seconds for which a host that has lost replica 0 looks for its successor.
        rendezvous: address on which replica 0 listens; empty for MONARCH_RENDEZVOUS or else a socket on this machine.
        network: network options of the hosts.
        retry_on: exit codes, as a shell reports them, after which ranks are restarted; empty for any.
        command: the role's command.
        lease: seconds of silence after which another host or the agent counts as lost.
        peers: addresses of replica 0 of each role, as ``NAME=ADDRESS`` separated by commas; empty for MONARCH_PEERS.
        directory: address of the role registry, on replica 0 of the first role, which knows the addresses of the other
            roles; empty for none.
        application: address of replica 0 of the first role, if all roles restart together; empty otherwise.
        beside: number of roles that restart together with the first role.
        await_roles: names of those roles whose success the first role awaits before it ends.
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
