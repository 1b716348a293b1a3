# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch profile`` and ``stacks``: what ranks do with their time, and where they are now."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Mapping

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.arguments import add_hosts, rank_list, seconds
from torchx_monarch.cli.output import STDOUT, print_json, write_output
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.client.rank_queries import ask_profiles, ask_stacks, describe_absent
from torchx_monarch.insight.profile import MAX_SECONDS, collapsed, flame_graph, speedscope
from torchx_monarch.insight.stacks import rank_ranges, render
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hosts(parser)
    parser.add_argument("--rank", type=rank_list, metavar="RANKS", help="only these ranks: 0,3-5 (default: all)")
    parser.add_argument(
        "--seconds", type=seconds(1, MAX_SECONDS), default=10.0, help="how long they are sampled (default: 10)"
    )
    parser.add_argument("--idle", action="store_true", help="with threads that wait, such as in a collective")
    parser.add_argument(
        "-o",
        "--output",
        default="profile.svg",
        metavar="FILE",
        type=_output,
        help="the file to write: .svg is a flame graph, .json for speedscope.app, .txt or - collapsed stacks "
        "(default: profile.svg)",
    )


def _output(path: str) -> str:
    if path not in STDOUT and os.path.splitext(path)[1] not in (".svg", ".json", ".txt"):
        raise argparse.ArgumentTypeError(f"{path!r} ends neither with .svg nor .json nor .txt")
    if not os.path.isdir(folder := os.path.dirname(path) or os.curdir):  # said before ranks are sampled for minutes
        raise argparse.ArgumentTypeError(f"there is no folder {folder}")
    return path


def run(args: argparse.Namespace) -> None:
    """Write the profile; exit with ``UNAVAILABLE`` if a host or a rank has none."""
    ranks = set(itertools.chain.from_iterable(args.rank or ()))
    hosts = Hosts.of_ranks(args.handle, args.role, args.address)
    profiles, missing = ask_profiles(hosts, ranks, args.seconds, args.idle)
    found = [profile for profile in profiles if profile.samples]
    _say_missing(missing)
    for profile in profiles:
        if profile.problem:
            say(f"rank {profile.rank} (host {profile.replica}): {one_line(profile.problem, 300)}")
    lost = sorted(ranks - {profile.rank for profile in profiles}) if not missing else []
    if lost or not (profiles or missing):
        say(describe_absent(hosts, lost))
    if found:
        kind = os.path.splitext(args.output)[1]
        title = f"{args.handle}: {rank_ranges([profile.rank for profile in found])}, {args.seconds:g} s"
        writers = {".svg": lambda: flame_graph(found, title), ".json": lambda: speedscope(found)}
        write_output(args.output, writers.get(kind, lambda: collapsed(found))())
        if args.output not in STDOUT:
            counts = {str(profile.rank): sum(profile.samples.values()) for profile in found}
            if args.json:
                print_json({"path": os.path.abspath(args.output), "samples": counts})
            else:
                print(f"{args.output}: {sum(counts.values())} samples of {rank_ranges([*map(int, counts)])}")
    if missing or lost or len(found) < max(1, len(profiles)):
        sys.exit(exit_codes.UNAVAILABLE)


class CmdStacks:
    """Implement ``torchx monarch stacks``: show where ranks are, equal stacks together, the rarest first."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_hosts(parser)
        parser.add_argument("--rank", type=int, metavar="K", help="this rank alone (default: all)")

    def run(self, args: argparse.Namespace) -> None:
        """Print the stacks; exit with ``UNAVAILABLE`` if a host has not answered, or no rank runs."""
        hosts = Hosts.of_ranks(args.handle, args.role, args.address)
        stacks, missing = ask_stacks(hosts, args.rank)
        if args.json:
            print_json({"stacks": [dataclasses.asdict(stack) for stack in stacks], "missing": missing})
        else:
            print("".join(f"{line}\n" for line in render(stacks)), end="")
        _say_missing(missing)
        if not stacks and not missing:
            say(describe_absent(hosts, [] if args.rank is None else [args.rank]))
        if missing or not stacks:
            sys.exit(exit_codes.UNAVAILABLE)


def _say_missing(missing: Mapping[str, str]) -> None:
    for replica, why in missing.items():
        say(f"host {replica}: {one_line(why, 300)}")
