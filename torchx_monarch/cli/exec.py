# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch exec``: run a command on the hosts of a live allocation."""

from __future__ import annotations

import argparse
from typing import get_args

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.allocation_arguments import add_role_and_address, hosts_of
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.output import add_json
from torchx_monarch.cli.run_output import print_accepted, stream_and_exit
from torchx_monarch.client.hosts import START_TIMEOUT, say
from torchx_monarch.client.run import Records
from torchx_monarch.client.run_options import RunOptions, run_message
from torchx_monarch.client.workspace_sync import SyncMode, current_workspace
from torchx_monarch.system.termination import termination

_USAGE = "usage: torchx monarch exec HANDLE [options] [-- torchrun --nproc-per-node 4 train.py ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser, required=True)
    _add_options(parser)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="torchrun, python or a script, with arguments"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_role_and_address(parser)
    parser.add_argument("--nproc", default="", help="ranks on each host (default: as the command says)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable for the ranks")
    parser.add_argument("--cwd", default="", help="folder that the hosts have, in which ranks start; no code is sent")
    parser.add_argument(
        "--workspace",
        help="folder with the code to send first (default: the current one, unless it is the home folder); '' sends "
        "nothing",
    )
    parser.add_argument(
        "--sync",
        choices=get_args(SyncMode),
        default="auto",
        help="whether each host gets a copy of the code; auto: unless all of them see the folder itself",
    )
    parser.add_argument("--timeout", type=float, help="seconds after which the hosts end the run")
    parser.add_argument("--queue", action="store_true", help="wait for the end of earlier runs (default: fail)")
    parser.add_argument("--detach", action="store_true", help="print the run's number, and do not wait for its end")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the phases of the run as well")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Run a command on the hosts, after bringing them the code."""
    words = _words(args)
    env = {}
    for pair in args.env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise CommandError(f"--env {pair}: give NAME=VALUE", exit_codes.USAGE)
        env[name] = value
    workspace = current_workspace() if args.workspace is None and not args.cwd else args.workspace
    options = RunOptions(
        env=env,
        nproc=args.nproc or None,
        timeout=args.timeout,
        cwd=args.cwd or None,
        workspace=workspace or None,
        sync=args.sync,
        queue=args.queue,
    )
    hosts = hosts_of(args)
    if not args.detach:
        termination.install()
    hosts.wait(START_TIMEOUT, say)
    message = run_message(hosts, words or None, options)
    if not args.detach:
        termination.hold()  # a run cannot be stopped before its number is known: collect_with_interrupts releases them
    records = Records.request(hosts, message)
    if args.detach:
        print_accepted(args.handle, records.run) if args.json else print(records.run)
        records.close()
        return
    stream_and_exit(hosts, records, args.verbose, as_json=args.json)


def _words(args: argparse.Namespace) -> list[str]:
    """Return the words of the command to run.

    ``argparse.REMAINDER`` swallows options that follow the handle; this function parses them into ``args``.
    """
    typed: list[str] = args.command
    if not typed or not typed[0].startswith("-") or typed[0] == "-m":
        return typed
    parser = argparse.ArgumentParser(prog="torchx monarch exec HANDLE", add_help=False)
    _add_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    # After -mNAME, argparse would take the module's options for those of this command: after -m NAME it does not.
    if parser.parse_known_args(typed, argparse.Namespace(**vars(args)))[0].module:
        at = next(at for at, word in enumerate(typed) if word.startswith("-m"))
        typed = [*typed[:at], "-m", *filter(None, [typed[at][2:]]), *typed[at + 1 :]]
    _, unknown = parser.parse_known_args(typed, args)
    if unknown:
        raise CommandError(f"{unknown[0]} is no option here. {_USAGE}", exit_codes.USAGE)
    if args.module:
        return ["-m", *args.module]
    return args.program[1:] if args.program[:1] == ["--"] else list(args.program)
