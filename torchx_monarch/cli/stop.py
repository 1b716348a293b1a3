# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch stop``: give the hosts of a live allocation back, or end one run."""

from __future__ import annotations

import argparse

from torchx_monarch.cli.allocation_arguments import add_handle, hosts_of
from torchx_monarch.cli.handles import unknown
from torchx_monarch.cli.output import print_json
from torchx_monarch.client.connection import ask
from torchx_monarch.client.hosts import say
from torchx_monarch.exceptions import AllocationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser, required=True)
    parser.add_argument("--run", type=int, help="end the run of this number, and keep the hosts")


def run(args: argparse.Namespace) -> None:
    if args.run is not None:
        answer = hosts_of(args).ask({"type": "end-run", "run": args.run, "kill": False})
        is_running = answer["state"] in ("queued", "running")
        done = f"stopping run {args.run}" if is_running else f"run {args.run} has ended"
    else:
        done = _stop_hosts(args)
    if not args.json:
        say(done)
    else:
        stopped = "allocation" if args.run is None else "run"
        print_json({"handle": args.handle, "stopped": stopped, "run": args.run})


def _stop_hosts(args: argparse.Namespace) -> str:
    hosts = hosts_of(args)
    status = hosts.ask_status()
    if status is None:  # unreachable hosts may still be queued: the scheduler can cancel them
        if (before := hosts.runner.status(args.handle)) is None:
            raise unknown(args.handle)
        hosts.release()
        ended = before.is_terminal()
        return f"{args.handle} had ended before: {before.state.name}" if ended else f"cancelled {args.handle}"
    if status.message:
        raise AllocationError(f"{status.message}; to end it: torchx cancel {args.handle}")
    ask(hosts.target, {"type": "stop"})
    return f"stopped {args.handle}"
