# SPDX-License-Identifier: BSD-3-Clause
"""The options of a job that its controller needs."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchx_monarch.command.command import Command
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.model.host_spec import ON_HANG, PREFLIGHT, HostSpec


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of a job that its controller needs.

    Attributes:
        run_id: TORCHELASTIC_RUN_ID of the ranks.
        max_restarts: number of restarts after a rank has failed; one budget for the whole job.
        replacements: number of lost hosts that the backend replaces.
        retry_on: exit codes, as a shell reports them, after which ranks are restarted; empty for any.
        first_log_attempt: number of the first attempt's log folders.
        sizes: number of hosts, and how long the job waits for them.
        host_timeout: seconds for rank 0's interpreter to find a port.
        grace: seconds from SIGTERM to SIGKILL for ranks.
        master_addr: address by which ranks dial rank 0, unless the user names one.
        store_bind: local address on which rank 0's store listens, unless the user names one; empty for all.
        report_timeout: seconds to wait for a host's own report after it has refused a request.
        lease: seconds to wait for that report if a host may be silent, but not gone.
        hang_after: seconds for which ranks wait in a collective until that counts as a hang; 0 for never.
        on_hang: what to do about ranks that hang: ``observe``, ``restart`` or ``fail``.
        preload: modules that each host imports once for all of its ranks, for messages; empty for none.
        preflight: whether hosts are checked before ranks start: ``on``, ``warn`` or ``off``.
        same_step_limit: number of failures in a row at one step after which ranks are not restarted; 0 for any.
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
    report_timeout: float
    lease: float
    hang_after: float = 0.0
    on_hang: str = ON_HANG[0]
    preload: tuple[str, ...] = ()
    preflight: str = PREFLIGHT[0]
    same_step_limit: int = 0

    @classmethod
    def of(
        cls, options: HostSpec, command: Command | None, node_range: NodeRange, network: HostNetwork, **more: Any
    ) -> JobOptions:
        """Derive the options from those of replica 0's host.

        Args:
            command: the role's command; None if it cannot be parsed.
            more: the other attributes: ``run_id``, ``first_log_attempt`` and ``grace``.
        """
        return cls(
            max_restarts=command.options.max_restarts if command else 0,
            replacements=options.replacements,
            retry_on=options.retry_on,
            sizes=node_range,
            host_timeout=options.host_timeout,
            master_addr=network.advertised,
            store_bind=network.bind,
            # Over a network, the loss of a machine is noticed only after peer_timeout seconds of silence.
            report_timeout=options.peer_timeout + 3.0 if network.rendezvous.networked else 1.0,
            lease=options.lease,
            hang_after=options.hang_after,
            on_hang=options.on_hang,
            preload=options.preload_modules if options.forks_ranks else (),
            preflight=options.preflight,
            same_step_limit=options.same_step_limit,
            **more,
        )
