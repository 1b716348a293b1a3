# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch stop``: give the hosts of a live allocation back, or end one run."""

from __future__ import annotations

import argparse

from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of, job_of
from torchx_monarch.cli.json_output import add_json, print_json
from torchx_monarch.client.connection import ask
from torchx_monarch.exceptions import UnreachableError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch stop``."""
    add_handle(parser)
    parser.add_argument(
        "--run", type=int, nargs="?", const=0, help="end this run, or the one that runs; keep the hosts"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """End the allocation, or the run that ``--run`` names."""
    if args.run is not None:
        job_of(args).cancel_run(args.run or None)
    else:
        _stop_hosts(args)
    if args.json:
        stopped = "allocation" if args.run is None else "run"
        print_json({"handle": args.handle, "stopped": stopped, "run": args.run or None})


def _stop_hosts(args: argparse.Namespace) -> None:
    hosts = hosts_of(args)
    try:
        ask(hosts.target, {"type": "stop"})
    except UnreachableError:
        hosts.release()  # unreachable hosts may still be queued: the scheduler can cancel them
