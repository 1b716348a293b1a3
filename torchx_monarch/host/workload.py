# SPDX-License-Identifier: BSD-3-Clause
"""What the parts of a host process share, and the parts of a controller."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Coroutine
from typing import Any

from torchx_monarch.command.command import Command
from torchx_monarch.controller.elastic import HostGatherer, NodeRange
from torchx_monarch.controller.host_messages import Report
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.roles import Roles
from torchx_monarch.host.ranks.breakpoints import Connect, Streams
from torchx_monarch.host.ranks.rank_environment import env_number
from torchx_monarch.host.ranks.rank_logs import RankLogs
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import ConnectError


@dataclasses.dataclass
class Host:
    """The values that the parts of a host process share.

    Attributes:
        options: command line of the host process.
        environ: environment in which the backend started it, and in which its ranks start.
        hostname: name of the machine.
        stdout: the stdout with which the host process was started.
        stderr: its stderr.
        log_dir: folder of its logs.
        reporter: writes progress lines and events.
        sockets: folder of its sockets; empty before it exists.
        grace: seconds from SIGTERM to SIGKILL for ranks: torchrun's option or variable if given, else ``--grace``.
        restarts: how often the backend has restarted a batch job before this start.
        roles: the other roles of the app; None before they are known.
        report: sends a report to replica 0; None on replica 0, and while this host is not registered.
        connector: opens another connection to replica 0 with a greeting; None before it is reached.
    """

    options: HostSpec
    environ: dict[str, str]
    hostname: str
    stdout: Console
    stderr: Console
    log_dir: str
    reporter: Reporter
    sockets: str = ""
    grace: float = 0.0
    restarts: int = 0
    roles: Roles | None = None
    report: Callable[[Report], Coroutine[Any, Any, None]] | None = None
    connector: Connect | None = None

    @property
    def own_log(self) -> str:
        """The file with what the host process itself prints, such as the traceback of an error."""
        return os.path.join(self.log_dir, "monarch.log")

    @property
    def attach_socket(self) -> str:
        """The socket file to which ranks connect in order to attach to the hosts (see ``attach_relay``)."""
        return os.path.join(self.sockets, "attach")

    async def connect(self, greeting: messages.Message) -> Streams:
        """Open another connection to replica 0.

        Args:
            greeting: the greeting, without the version.

        Raises:
            ConnectError: replica 0 is not reached.
        """
        if self.connector is None:
            raise ConnectError("this host has not registered")
        return await self.connector(greeting)

    def read_grace(self, command: Command | None = None) -> None:
        """Set ``grace`` from the environment, and from torchrun's options if a command is given.

        Raises:
            CommandError: the variable is no number.
        """
        self.grace = env_number(self.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", self.options.grace)
        if command is not None and command.options.shutdown_timeout is not None:
            self.grace = float(command.options.shutdown_timeout)

    def run_id(self, command: Command | None) -> str:
        """Return TORCHELASTIC_RUN_ID: torchrun's ``--rdzv-id``, else the app's id (torchrun: a random id or none)."""
        given = command.options.rdzv_id if command else "none"
        return given if given != "none" else self.options.app

    def first_log_attempt(self, logs: RankLogs | None, max_restarts: int, sizes: NodeRange) -> int:
        """Return the number of the first attempt's log folders, after all that earlier starts may have used.

        A start uses at most one number for each attempt that it may make. This bound is unknown in two cases: a
        job that can lose hosts may make any number of attempts, and a restarted container has no MONARCH_RESTART.
        Replica 0 then continues after the highest existing folder: it takes part in each attempt. (With replacements
        the remaining hosts know the number.)
        """
        at_most = self.restarts * (1 + max_restarts + self.options.replacements)
        counted = "MONARCH_RESTART" in self.environ or self.options.replacements > 0
        if logs is None or (counted and not (sizes.can_lose and self.restarts)):
            return at_most
        return max(at_most, logs.last_attempt() + 1)


@dataclasses.dataclass(frozen=True)
class Control:
    """The parts of a controller with which a workload makes its ``SpmdWork``.

    Attributes:
        rendezvous: the rendezvous at which the hosts register.
        network: connections of this host.
        gatherer: gathers the hosts.
        options: options of the job.
    """

    rendezvous: Rendezvous
    network: HostNetwork
    gatherer: HostGatherer
    options: JobOptions
