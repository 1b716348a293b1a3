# SPDX-License-Identifier: BSD-3-Clause
"""Attach this terminal to the pdb of a rank that waits in a breakpoint (see ``controller.debug_sessions``).

All functions raise as ``Hosts`` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import termios
import tty
from collections.abc import Iterator

from torchx_monarch.client.connection import Connection
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.model.codec import decode
from torchx_monarch.system.termination import termination

DETACH_KEY = b"\x1d"
"""Ctrl-], as in telnet: the key that detaches."""

_PIECE = 4096
"""Bytes of input in one message."""

_SIZE_INTERVAL_S = 0.5
"""Seconds after which a new size of the terminal is noticed."""

_MORE_TIMEOUT = 0.01
"""Seconds for a message of which the first part has arrived, or that waits in the buffers of TLS."""


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


def attach(hosts: Hosts, rank: int) -> Connection:
    """Attach to a rank that waits in a breakpoint; return the connection to replica 0, for ``interact``.

    Raises:
        RefusedError: the rank waits in no breakpoint, or is being debugged by another client.
    """
    greeting = {"type": "debug", "rank": rank, "kind": os.environ.get("TERM", "dumb"), **_size()}
    link = hosts.open(greeting, wait=False)
    try:
        link.answer()
    except BaseException:
        link.close()
        raise
    return link


def interact(link: Connection) -> str:
    """Pass keys on to the rank, and show its output, until one side ends; return what has become of the rank."""
    sent_size = _size()
    with link, _raw_terminal():
        reason = _show(link)  # messages may have arrived with the answer
        while not reason:
            readable, _, _ = select.select([0, link.fileno()], [], [], _SIZE_INTERVAL_S)
            if (size := _size()) != sent_size:
                sent_size = size
                link.send({"type": "size", **size})
            if 0 in readable:
                keys = os.read(0, _PIECE)
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
            data = str(message.get("data", "")).encode("latin-1", "replace")
            while data:
                data = data[os.write(1, data) :]
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


def _size() -> dict[str, int]:
    """Return the size of the terminal, as fields of a message."""
    columns, rows = os.get_terminal_size(0)
    return {"rows": rows, "columns": columns}
