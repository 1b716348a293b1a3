# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options of a job that its controller needs."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchx_monarch.command.command import Command
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.host_options import HostOptions


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What the controller needs to know of the job.

    Attributes:
        run_id: TORCHELASTIC_RUN_ID of the ranks.
        max_restarts: how often the ranks are started again after one has failed; one budget for the whole job.
        replacements: how many lost hosts the backend replaces.
        retry_on: exit codes, as a shell has them, after which ranks are started again; empty for any.
        first_log_attempt: number of the first attempt's log folders.
        sizes: how many hosts it runs on, and how long it waits for them.
        host_timeout: seconds that rank 0's interpreter has to find a port.
        grace: seconds from SIGTERM to SIGKILL for ranks.
        master_addr: what ranks dial to meet rank 0, unless the user names it.
        store_bind: the local address that its store listens on, unless the user names another; empty for all.
        said_within: seconds that the rendezvous has to say which host is lost when Monarch has found a call to fail.
        lease: seconds that it has where a host or an agent may be silent, and not gone.
        monarch_log: where Monarch says more.
    """

    run_id: str
    max_restarts: int
    replacements: int
    retry_on: tuple[int, ...]
    first_log_attempt: int
    sizes: NodeRange
    host_timeout: float
    grace: float
    master_addr: str
    store_bind: str
    said_within: float
    lease: float
    monarch_log: str

    @classmethod
    def of(
        cls, options: HostOptions, command: Command | None, node_range: NodeRange, network: HostNetwork, **more: Any
    ) -> JobOptions:
        """Derive the options from those of replica 0's host.

        Args:
            options: of the host.
            command: of the role; None where it cannot be parsed.
            node_range: how many hosts the role runs on.
            network: of the host.
            more: the other attributes: ``run_id``, ``first_log_attempt``, ``grace`` and ``monarch_log``.
        """
        return cls(
            max_restarts=command.options.max_restarts if command else 0,
            replacements=options.replacements,
            retry_on=options.retry_on,
            sizes=node_range,
            host_timeout=options.host_timeout,
            master_addr=network.advertised,
            store_bind=network.bind,
            # A machine that is gone is noticed by its silence.
            said_within=options.network.peer_timeout + 3.0 if network.rendezvous.networked else 1.0,
            lease=options.lease,
            **more,
        )
