# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch debug``: the pdb of a rank that waits in a breakpoint, on this terminal.

``controller.rank_clients`` is the other side. Functions that ask hosts raise as ``Hosts`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import select
import termios
import tty
from collections.abc import Iterator

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.arguments import add_hosts
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.output import print_json, print_table
from torchx_monarch.client.connection import Connection
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.model.codec import decode
from torchx_monarch.system.safe_files import write_all
from torchx_monarch.system.termination import termination
from torchx_monarch.system.untrusted_text import one_line

DETACH_KEY = b"\x1d"
"""Ctrl-], as in telnet: the key that detaches."""

_MORE_TIMEOUT = 0.01
"""Seconds for a message of which the first part has arrived, or that waits in the buffers of TLS."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hosts(parser)
    parser.add_argument("--rank", type=int, metavar="K", help="this rank (default: the one that waits, or a list)")


def run(args: argparse.Namespace) -> None:
    """Attach to the rank that is named, or that alone waits; list those that are in a breakpoint otherwise.

    Exit with ``UNAVAILABLE`` if none waits.
    """
    hosts = Hosts.of_ranks(args.handle, args.role, args.address)
    found = [place for place in list_breakpoints(hosts) if args.rank in (None, place.rank)]
    waiting = [place for place in found if not place.attached]
    if args.json:
        print_json({"breakpoints": [dataclasses.asdict(place) for place in found]})
        return
    if args.rank is None and len(waiting) != 1:
        _print(found)
        if waiting:
            raise CommandError("name one of them: --rank K", exit_codes.USAGE)
        raise CommandError("no rank waits in a breakpoint", exit_codes.UNAVAILABLE)
    if not (os.isatty(0) and os.isatty(1)):
        raise CommandError("a debugger needs a terminal as stdin and stdout", exit_codes.USAGE)
    rank = waiting[0].rank if args.rank is None else args.rank
    columns, rows = os.get_terminal_size(0)
    terminal = {"kind": os.environ.get("TERM", "dumb"), "rows": rows, "columns": columns}
    with hosts.open({"type": "debug", "rank": rank, **terminal}, wait=False) as link:
        link.answer()  # refused if the rank waits in no breakpoint, or another client debugs it
        say(f"attached to rank {rank}. With `detach` or Ctrl-] it goes on without a debugger")
        reason = interact(link)
    say(f"rank {rank} {one_line(reason, 300)}")


def _print(found: list[Breakpoint]) -> None:
    rows = [
        (place.rank, place.pid, f"{place.file}:{place.line}", place.function, "yes" if place.attached else "no")
        for place in found
    ]
    if rows:
        titles = ["rank", "pid", "at", "in", "attached"]
        print_table(titles, [[one_line(str(cell), 300) for cell in row] for row in rows])


# -- the rank and the terminal -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Breakpoint:
    """A rank in a breakpoint: its process and the source file are those on its host."""

    rank: int
    pid: int
    file: str
    line: int
    function: str
    attached: bool


def list_breakpoints(hosts: Hosts) -> list[Breakpoint]:
    """Return the ranks that are in a breakpoint, by rank."""
    answer = hosts.ask({"type": "breakpoints"}, wait=False)
    return [decode(Breakpoint, rank) for rank in answer["ranks"]]


def interact(link: Connection) -> str:
    """Pass keys on to the rank, and show its output, until one side ends; return what has become of the rank."""
    with _raw_terminal():
        reason = _show(link)  # messages may have arrived with the answer
        while not reason:
            readable, _, _ = select.select([0, link.fileno()], [], [])
            if 0 in readable:
                keys = os.read(0, 4096)
                before, detach, _ = keys.partition(DETACH_KEY)
                if before:
                    link.send({"type": "input", "data": before.decode("latin-1")})
                if detach or not keys:
                    link.send({"type": "detach"})
            if link.fileno() in readable:
                reason = _show(link)
        return reason


def _show(link: Connection) -> str:
    """Show the output that has arrived; return what has become of the rank at the end, or empty."""
    with contextlib.suppress(TimeoutError):
        while message := link.receive(_MORE_TIMEOUT):
            if message.get("type") == "end":
                return str(message.get("reason"))
            write_all(1, str(message.get("data", "")).encode("latin-1", "replace"))
        raise UnreachableError("the connection to the job broke")
    return ""


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Have the terminal pass on each key at once; restore it, also when a signal ends this process."""
    before = termios.tcgetattr(0)
    termination.install()
    try:
        tty.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        termination.remove()
