# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that several sub-commands have: those that name a live allocation, ``--rank`` and ``--since``."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone

from torchx_monarch.cli import handles
from torchx_monarch.client.hosts import START_TIMEOUT, Hosts
from torchx_monarch.insight.rank_sample import parse_ranks

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_handle(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Define the handle of an allocation, see ``handles.add_handle``, and the options that say where its hosts are."""
    handles.add_handle(parser, required)
    add_role_and_address(parser)


def add_role_and_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", default="", help="which of the app's roles (default: the first)")
    add_address(parser)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Define the option for a machine that is not in the network of the hosts."""
    parser.add_argument(
        "--address", default="", help="HOST:PORT where replica 0 is reached from here: the near end of a tunnel"
    )


def hosts_of(args: argparse.Namespace, start_timeout: float = START_TIMEOUT) -> Hosts:
    return Hosts(args.handle, args.role, args.address, start_timeout=start_timeout)


def rank_list(text: str) -> tuple[range, ...]:
    """Parse ``--rank``, a list of ranks and ranges of ranks: ``0,3-5``."""
    with contextlib.suppress(ValueError):
        ranks = parse_ranks(text)
        if ranks and all(ranks):
            return ranks
    raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks, such as 0,3-5")


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Return a function that parses a number of seconds within limits."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= float(text) <= most:  # not NaN
                return float(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not between {least:g} and {most:g} seconds")

    return parse


def since(text: str) -> datetime:
    """Parse ``--since``: a duration before now (``90s``, ``10m``, ``2h``, ``1d``), or a time (ISO 8601)."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    try:
        if parts:
            when = datetime.fromtimestamp(time.time() - float(parts[1]) * _UNITS[parts[2] or "s"], timezone.utc)
        else:
            when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        when.timestamp()  # which a time of the first and last years does not have
        return when
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a duration (90s, 10m, 2h, 1d) nor a time (2026-11-22T14:30)"
        ) from None
