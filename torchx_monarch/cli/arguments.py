# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that several sub-commands have, first of all which app the user means.

That is a handle, an app's id or name, the beginning of one, or ``last``, of the apps of this machine's records
(``schedulers.recorded_apps``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.model.host_spec import parse_duration
from torchx_monarch.schedulers.recorded_apps import LAST, named, recorded_apps
from torchx_monarch.system.untrusted_text import one_line

if TYPE_CHECKING:
    from torchx_monarch.client.hosts import Hosts

HELP = "the app: its handle, its id or name, the beginning of one, or 'last'"

_CANDIDATES = 8
"""Apps that a message lists at most."""


def add_handle(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Define the argument ``handle`` of a sub-command; ``resolve`` is applied to it before the sub-command runs."""
    text = HELP if required else f"{HELP} (default: last)"
    parser.add_argument("handle", nargs=None if required else "?", default=LAST, metavar="HANDLE", help=text)


def resolve(word: str) -> str:
    """Return the handle of the app that a word names (``named``).

    A handle is returned as it is: it may be of an app that another machine has submitted.

    Raises:
        CommandError: no app is named so, or several begin so.
    """
    if "://" in word:
        return word
    if word == LAST:
        if not (apps := recorded_apps()):
            raise CommandError("no app was submitted from this machine yet", exit_codes.UNKNOWN_APP)
        return apps[0].handle
    found = named(word)
    if len(found) == 1:
        return found[0].handle
    if found:
        ages = [show_duration(time.time() - app.submitted) for app in found[:_CANDIDATES]]
        lines = [f"  {one_line(app.handle)}  submitted {age} ago" for app, age in zip(found, ages, strict=False)]
        message = f"{one_line(word)!r} may be one of {len(found)} apps; type more of its id:"
        raise CommandError("\n".join([message, *lines]), exit_codes.USAGE)
    raise unknown(word)


def unknown(word: str) -> CommandError:
    """Return the error for a word that names no app, with the apps whose names are similar."""
    import difflib

    apps = [app for app in recorded_apps() if app.handle != word]  # which its scheduler does not know any more
    words = {app_word for app in apps for app_word in app.words}
    alike = {*difflib.get_close_matches(word.rpartition("/")[2], words, _CANDIDATES)}
    near = [f"  {one_line(app.handle)}" for app in apps if app.words & alike][:_CANDIDATES]
    text = f"there is no app {one_line(word)!r}"
    if near:
        return CommandError("\n".join([f"{text}; similar ones:", *near]), exit_codes.UNKNOWN_APP)
    return CommandError(f"{text}; `torchx monarch ls` lists all", exit_codes.UNKNOWN_APP)


# -- hosts, ranks and times --------------------------------------------------------------------------------------------


def add_hosts(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Define ``handle``, and the options that say where the hosts of an allocation are."""
    add_handle(parser, required)
    add_role_and_address(parser)


def add_role_and_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", default="", help="which of the app's roles (default: the first)")
    add_address(parser)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Define the option for a machine that is not in the network of the hosts."""
    parser.add_argument(
        "--address", default="", help="HOST:PORT where replica 0 is reached from here: the near end of a tunnel"
    )


def hosts_of(args: argparse.Namespace, **options: Any) -> Hosts:
    """Return the hosts that the options name; further ``options`` are those of ``Hosts``."""
    from torchx_monarch.client.hosts import Hosts

    return Hosts(args.handle, args.role, args.address, **options)


def rank_list(text: str) -> tuple[range, ...]:
    """Parse ``--rank``, a list of ranks and ranges of ranks: ``0,3-5``."""
    from torchx_monarch.insight.group_calls import parse_ranks

    with contextlib.suppress(ValueError):
        ranks = parse_ranks(text)
        if ranks and all(ranks):
            return ranks
    raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks, such as 0,3-5")


def count(text: str) -> int:
    """Parse a number of lines or jobs, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number, 0 or more")
    return min(int(text), sys.maxsize // 2)  # what a deque may have, with more for states of progress bars


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
    with contextlib.suppress(ValueError):
        return datetime.fromtimestamp(time.time() - parse_duration(text), timezone.utc)
    with contextlib.suppress(ValueError, OverflowError):
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        when.timestamp()  # which a time of the first and last years does not have
        return when
    raise argparse.ArgumentTypeError(f"{text!r} is neither a duration (90s, 10m, 2h, 1d) nor a time (2026-11-22T14:30)")
