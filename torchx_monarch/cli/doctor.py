# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch doctor``: check what is installed, and whether a scheduler can be used."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.output import add_json, print_json
from torchx_monarch.schedulers.doctor import diagnose
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-s", "--scheduler", default="", help="check this scheduler, too, with its options")
    parser.add_argument("-cfg", "--scheduler-args", default="", metavar="CFG", help="run options, as for torchx run")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print a line for each check; exit with ``FAILED`` if one has failed."""
    if args.scheduler_args and not args.scheduler:
        print("-cfg needs -s SCHEDULER: the options are a scheduler's", file=sys.stderr)
        sys.exit(exit_codes.USAGE)
    results = diagnose(args.scheduler, args.scheduler_args)
    if args.json:
        print_json([{"level": result.level, **dataclasses.asdict(result)} for result in results])
    else:
        for result in results:
            print(one_line(result.line(), 500))
    if any(result.level == "fail" for result in results):
        sys.exit(exit_codes.FAILED)
