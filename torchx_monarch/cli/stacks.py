# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch stacks``: show where the ranks of a job are, equal stacks together, the rarest first."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.output import print_json
from torchx_monarch.client.hosts import say
from torchx_monarch.client.rank_queries import ask_stacks, describe_absent
from torchx_monarch.insight.stacks import render
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("--rank", type=int, metavar="K", help="this rank alone (default: all)")


def run(args: argparse.Namespace) -> None:
    """Print the stacks; exit with ``UNAVAILABLE`` if a host has not answered, or no rank runs."""
    hosts = hosts_of(args)
    stacks, missing = ask_stacks(hosts, args.rank)
    if args.json:
        print_json({"stacks": [dataclasses.asdict(stack) for stack in stacks], "missing": missing})
    else:
        print("".join(f"{line}\n" for line in render(stacks)), end="")
    for replica, why in missing.items():
        say(f"host {replica}: {one_line(why, 300)}")
    if not stacks and not missing:
        say(describe_absent(hosts, [] if args.rank is None else [args.rank]))
    if missing or not stacks:
        sys.exit(exit_codes.UNAVAILABLE)
