# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch follow``: show the output of a run that another shell has begun."""

from __future__ import annotations

import argparse

from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.run_output import stream_and_exit
from torchx_monarch.client.run import Records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch follow``."""
    add_handle(parser)
    parser.add_argument("run", type=int, nargs="?", help="its number (default: the one that runs, or the last)")


def run(args: argparse.Namespace) -> None:
    """Show a run's output until its end; Ctrl-C leaves the run running."""
    hosts = hosts_of(args)
    stream_and_exit(hosts, Records.of(hosts, {"type": "follow", "run": args.run}), verbose=False, ends=False)
