# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch debug``: the pdb of a rank that waits in a breakpoint, on this terminal."""

from __future__ import annotations

import argparse
import dataclasses
import os

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.output import add_json, print_json, print_table
from torchx_monarch.client.debugger import Breakpoint, attach, interact, list_breakpoints
from torchx_monarch.client.hosts import say
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("--rank", type=int, metavar="K", help="this rank (default: the one that waits, or a list)")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Attach to the rank that is named, or that alone waits; list those that are in a breakpoint otherwise.

    Exit with ``UNAVAILABLE`` if none waits.
    """
    hosts = hosts_of(args)
    found = [
        rank_breakpoint for rank_breakpoint in list_breakpoints(hosts) if args.rank in (None, rank_breakpoint.rank)
    ]
    waiting = [rank_breakpoint for rank_breakpoint in found if not rank_breakpoint.attached]
    if args.json:
        print_json({"breakpoints": [dataclasses.asdict(rank_breakpoint) for rank_breakpoint in found]})
        return
    if args.rank is None and len(waiting) != 1:
        _print(found)
        if waiting:
            raise CommandError("name one of them: --rank K", exit_codes.USAGE)
        raise CommandError("no rank waits in a breakpoint", exit_codes.UNAVAILABLE)
    if not (os.isatty(0) and os.isatty(1)):
        raise CommandError("a debugger needs a terminal as stdin and stdout", exit_codes.USAGE)
    rank = waiting[0].rank if args.rank is None else args.rank
    link = attach(hosts, rank)
    say(f"attached to rank {rank}. `detach` and Ctrl-] have it go on without a debugger")
    say(f"rank {rank} {one_line(interact(link), 300)}")


def _print(found: list[Breakpoint]) -> None:
    if found:
        rows = [
            [
                str(rank_breakpoint.rank),
                str(rank_breakpoint.pid),
                f"{rank_breakpoint.file}:{rank_breakpoint.line}",
                rank_breakpoint.function,
                "yes" if rank_breakpoint.attached else "no",
            ]
            for rank_breakpoint in found
        ]
        print_table(["rank", "pid", "at", "in", "attached"], [[one_line(cell, 300) for cell in row] for row in rows])
