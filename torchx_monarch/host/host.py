# SPDX-License-Identifier: BSD-3-Clause
"""What the parts of a host process share, and where its job's hosts meet."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from torchx_monarch.controller.host_messages import Report
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.env_names import INTERFACE
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.connections import Address

if TYPE_CHECKING:
    from torchx_monarch.command.command import Command


@dataclasses.dataclass
class Host:
    """The values that the parts of a host process share.

    Attributes:
        environ: environment in which the backend started the host process, and in which its ranks start.
        sockets: folder of its sockets; empty before it exists.
        grace: seconds from SIGTERM to SIGKILL for ranks: torchrun's option or variable if given, else ``--grace``.
        ends_at: when the job is known to end, by the time limit of Slurm or ``stop_after``, in seconds since the epoch;
            0 if that is not known.
        report: sends a report to replica 0; None while this host is not registered.
        network: its connections, once its addresses are settled.
        disk: the thread that makes, reads and removes the files of attempts: a disk may stand still for minutes.
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
    ends_at: float = 0.0
    report: Callable[[Report], Coroutine[Any, Any, None]] | None = None
    network: HostNetwork = dataclasses.field(init=False)
    disk: WriterThread = dataclasses.field(default_factory=WriterThread)

    @property
    def name(self) -> str:
        """The host's name for messages: ``host 1 (node7)``."""
        return f"host {self.options.replica} ({self.hostname})"

    @property
    def own_log(self) -> str:
        """The file with what the host process itself prints, such as the traceback of an error."""
        return os.path.join(self.log_dir, "monarch.log")

    @property
    def attach_socket(self) -> str:
        """The socket file to which ranks connect, to attach or to be debugged (see ``worker_loops``)."""
        return os.path.join(self.sockets, "attach")

    def settle_addresses(self, run_dir: str, command: Command | None) -> tuple[Address, str]:
        """Return where replica 0 listens, and by which name or address the other hosts dial this one.

        It sets ``INTERFACE`` and TORCHFT_LIGHTHOUSE for the ranks. The hosts of one machine meet in ``run_dir``.
        ``ValueError`` says which of the two is not valid, and why.
        """
        options, environ, is_first = self.options, self.environ, self.options.replica == 0
        given = options.rendezvous or environ.get("MONARCH_RENDEZVOUS") or f"unix:{run_dir}/r.sock"
        source = "--rendezvous" if options.rendezvous else "MONARCH_RENDEZVOUS"
        if options.lighthouse:
            where = local_addresses.expand_address(f"http:{options.lighthouse}", environ, is_first=False)
            environ["TORCHFT_LIGHTHOUSE"] = where.replace(":", "://", 1)
        rendezvous = Address.parse(local_addresses.expand_address(given, environ, is_first), source)
        if not rendezvous.networked:
            return rendezvous, "127.0.0.1"
        if rendezvous.scheme == "insecure-tcp":
            danger = "plain TCP: any process that reaches this host's ports can run code here"
            self.reporter.line(f"INSECURE: host {options.replica}: {danger}")
        if command is not None and command.options.local_addr and not options.advertise:
            options = dataclasses.replace(options, advertise=command.options.local_addr)
        given_address = environ.get("MONARCH_HOST_ADDRESS", "")
        advertised = local_addresses.advertised(rendezvous, is_first, options, given_address)
        if interface := local_addresses.gloo_interface(advertised):
            environ.setdefault(INTERFACE, interface)
        return rendezvous, advertised
