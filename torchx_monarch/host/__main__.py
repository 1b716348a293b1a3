# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the host process of one replica: ``python -m torchx_monarch.host [options] -- COMMAND``."""

from __future__ import annotations

import os
import sys

# `python -m` puts the working folder first in sys.path: a `monarch.py` or `types.py` of the user's must not shadow the
# modules that this process imports. (With -P, from Python 3.11 on, Python does not put it there.)
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import argparse  # noqa: E402
from typing import NoReturn  # noqa: E402

_LOWEST = {"grace": 0, "host_timeout": 0.001, "rejoin_timeout": 0, "peer_timeout": 1, "lease": 1}
"""Smallest allowed value of each option that is a duration, in seconds."""


def main(argv: list[str]) -> NoReturn:
    """Run one replica of a role to its end.

    Args:
        argv: command-line arguments without the program's name: the options, ``--``, and the role's command.
    """
    from torchx_monarch.command.actors import is_actors
    from torchx_monarch.command.exit_codes import parse_exit_codes
    from torchx_monarch.controller.host_options import HostOptions
    from torchx_monarch.host.host_process import HostProcess
    from torchx_monarch.host.session_host import SessionHost, is_session
    from torchx_monarch.transport.local_addresses import NetworkOptions, parse_ports

    parser = argparse.ArgumentParser(prog="python -m torchx_monarch.host", description=__doc__, allow_abbrev=False)
    parser.add_argument("--app", required=True, help="id of the app")
    parser.add_argument("--role", required=True, help="name of the role")
    parser.add_argument("--replica", type=int, default=0, help="which replica of the role this is")
    parser.add_argument("--replicas", type=int, default=1, help="how many replicas the role has")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds from SIGTERM to SIGKILL for ranks")
    parser.add_argument("--host-timeout", type=float, default=300.0, help="seconds that all hosts have to arrive")
    parser.add_argument("--preload", default="torch", help="modules that rank interpreters import ahead, with commas")
    parser.add_argument(
        "--replacements", type=int, default=0, help="how many lost hosts the backend replaces; the job then goes on"
    )
    parser.add_argument(
        "--rendezvous",
        default="",
        help="where replica 0 listens: unix:PATH, tls:HOST:PORT or insecure-tcp:HOST:PORT; @NAME as HOST is the value "
        "of that environment variable, @ alone is told to the --directory by replica 0 (default: MONARCH_RENDEZVOUS, "
        "else a socket of this machine's)",
    )
    parser.add_argument("--bind", default="", help="address or interface to open ports on (default: all)")
    parser.add_argument(
        "--advertise", default="", help="name or address by which other hosts dial this one (default: as seen by them)"
    )
    parser.add_argument("--ports", help="LOW-HIGH: the ports that Monarch may listen on (default: any)")
    parser.add_argument(
        "--peer-timeout", type=float, default=5.0, help="seconds of a machine's silence until it counts as lost"
    )
    parser.add_argument(
        "--lease", type=float, default=30.0, help="seconds of a host's or agent's silence until it counts as lost"
    )
    parser.add_argument(
        "--rejoin-timeout", type=float, default=60.0, help="seconds that a host looks for another replica 0"
    )
    parser.add_argument(
        "--retry-on", default="", help="exit codes and signals after which ranks are started again, with commas"
    )
    parser.add_argument(
        "--peers", default="", help="NAME=RENDEZVOUS of each role, with commas, for a script that uses all of them"
    )
    parser.add_argument(
        "--directory",
        default="",
        help="where replica 0 of the first role listens, which is told where those of the other roles do",
    )
    parser.add_argument(
        "--application",
        default="",
        help="where replica 0 of the first role listens: when one role has failed all of them end, to begin again",
    )
    parser.add_argument("--beside", type=int, default=0, help="how many roles those are beside the first")
    parser.add_argument(
        "--await-role",
        action="append",
        default=[],
        help="name of a role whose success the first role waits for before it ends; may be given several times",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after `--`: what the role runs")
    args = parser.parse_args(argv)
    if not 0 <= args.replica < args.replicas:
        parser.error(f"--replica {args.replica} is not one of {args.replicas} replicas, which count from 0")
    for name, lowest in _LOWEST.items():
        value = getattr(args, name)
        if not lowest <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value:g}: give seconds, {lowest:g} or more")
    try:
        ports = parse_ports(args.ports) if args.ports else None
    except ValueError as error:
        parser.error(f"--ports: {error}")
    try:
        retry_on = parse_exit_codes(args.retry_on)
    except ValueError as error:
        parser.error(f"--retry-on {args.retry_on}: {error}")
    options = HostOptions(
        app=args.app,
        role=args.role,
        replica=args.replica,
        replicas=args.replicas,
        grace=args.grace,
        host_timeout=args.host_timeout,
        preload=tuple(name for name in args.preload.split(",") if name),
        replacements=args.replacements,
        rejoin_timeout=args.rejoin_timeout,
        rendezvous=args.rendezvous,
        network=NetworkOptions(args.bind, args.advertise, ports, args.peer_timeout),
        retry_on=retry_on,
        command=tuple(args.command),
        lease=args.lease,
        peers=args.peers,
        directory=args.directory,
        application=args.application,
        beside=args.beside,
        await_roles=tuple(args.await_role),
    )
    kind: type[HostProcess] = SessionHost if is_session(options, os.environ) else HostProcess
    if is_actors(args.command):
        from torchx_monarch.host.actor_host import ActorHost

        kind = ActorHost
    kind(options, os.environ).main()


if __name__ == "__main__":
    main(sys.argv[1:])
