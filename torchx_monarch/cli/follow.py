# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch follow``: show the output of a run that another shell has begun."""

from __future__ import annotations

import argparse

from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.output import add_json
from torchx_monarch.cli.run_output import stream_and_exit
from torchx_monarch.client.hosts import say
from torchx_monarch.client.runs import follow_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser, required=True)
    parser.add_argument("run", type=int, nargs="?", help="its number (default: the one that runs, or the last)")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Show a run's output until its end; Ctrl-C leaves the run running."""
    hosts = hosts_of(args)
    records = follow_run(hosts, args.run)
    if hosts.end_reason:
        say(f"{hosts.handle} {hosts.end_reason}; this is the log of its run {records.run}")
    stream_and_exit(hosts, records, verbose=False, ends=False, as_json=args.json)
