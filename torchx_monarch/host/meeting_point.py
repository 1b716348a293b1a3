# SPDX-License-Identifier: BSD-3-Clause
"""Where the hosts of a role meet: the address of replica 0, and the one by which the other hosts dial this host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torchx_monarch.command.command import Command
from torchx_monarch.controller.roles import Roles
from torchx_monarch.host.ranks.rank_environment import INTERFACE
from torchx_monarch.host.workload import Host
from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.connections import Address
from torchx_monarch.transport.local_addresses import NetworkOptions


def settle_addresses(
    host: Host, run_dir: str, command: Command | None, warn: Callable[[str], None]
) -> tuple[Address, str]:
    """Determine where replica 0 listens and by which name or address the other hosts dial this one.

    Sets ``host.roles``, and ``INTERFACE`` for the ranks.

    Args:
        host: the host.
        run_dir: folder of the socket file at which the hosts of one machine meet.
        command: the role's command; None if it is not valid.
        warn: called with a line for the job's log about a danger.

    Raises:
        ValueError: one of the two is not valid; the message names it and the reason.
    """
    options, environ, is_first = host.options, host.environ, host.options.replica == 0
    given = options.rendezvous or environ.get("MONARCH_RENDEZVOUS") or f"unix:{run_dir}/r.sock"
    source = "--rendezvous" if options.rendezvous else "MONARCH_RENDEZVOUS"
    host.roles = roles = Roles.of(options, given, environ)
    if roles.server is not None and roles.looks_up:
        # The route to the first role's replica 0 is also the route to the other hosts.
        given, is_first = given.replace("@", roles.server.host), False
    rendezvous = Address.parse(local_addresses.expand_address(given, environ, is_first), source)
    if not rendezvous.networked:
        return rendezvous, "127.0.0.1"
    if rendezvous.scheme == "insecure-tcp":
        warn("plain TCP: any process that reaches this host's ports can run code here")
    network_options = NetworkOptions.of(options)
    if command is not None and command.options.local_addr and not network_options.advertise:
        network_options = dataclasses.replace(network_options, advertise=command.options.local_addr)
    given_address = environ.get("MONARCH_HOST_ADDRESS", "")
    advertised = local_addresses.advertised(rendezvous, is_first, network_options, given_address)
    if interface := local_addresses.gloo_interface(advertised):
        environ.setdefault(INTERFACE, interface)
    if roles.looks_up:
        rendezvous = dataclasses.replace(rendezvous, host=advertised)
    return rendezvous, advertised
