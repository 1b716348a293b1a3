# SPDX-License-Identifier: BSD-3-Clause
"""The arguments that name a live allocation."""

from __future__ import annotations

import argparse

from torchx_monarch.cli import handles
from torchx_monarch.client.allocation import Allocation
from torchx_monarch.client.hosts import Hosts


def add_handle(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Define the handle of an allocation and the options that say where its hosts are.

    Args:
        optional: whether the handle may be left out; it is None then.
    """
    handles.add_handle(parser, optional)
    add_role_and_address(parser)


def add_role_and_address(parser: argparse.ArgumentParser) -> None:
    """Define the options that say where the hosts of an allocation are."""
    parser.add_argument("--role", default="", help="which of the app's roles (default: the first)")
    parser.add_argument(
        "--address", default="", help="HOST:PORT where replica 0 is reached from here: the near end of a tunnel"
    )


def hosts_of(args: argparse.Namespace) -> Hosts:
    """Return the hosts that the arguments name.

    Raises:
        HandleError: they are to be on this machine, and there is no such app.
    """
    _check(args)
    return Hosts(args.handle, args.role, args.address)


def job_of(args: argparse.Namespace) -> Allocation:
    """Return the job that the arguments name; raises as ``hosts_of`` does."""
    _check(args)
    return Allocation(args.handle, args.role, args.address)


def _check(args: argparse.Namespace) -> None:
    # With an address, this machine need not know the app.
    if not args.address:
        handles.check_local(args.handle)
